"""Our connector for vLLM with faults, for tests: vLLM's processes import it, and look for files in a directory.

`fail` in DYN_TEST_TIER_FAULTS makes every load fail, `slow` makes it take a second, `full` makes every offload fail.
Loads of more than four blocks run beside vLLM's steps, and smaller ones before them, so that a small model does both.
"""

import os
import time
from pathlib import Path

from dynamo.base import errors
from dynamo.engine.adapters.vllm import tier_connector, tier_worker
from dynamo.kvbm import tiered_cache
from dynamo.transfer import api

FAULTS = "DYN_TEST_TIER_FAULTS"
SLOW_S = 1.0
tiered_cache.QUICK_BYTES = 4 * 65536
tiered_cache.QUICK_SHARE = 0


class FaultyMemory(tier_worker.LayerMemory):
    def move(self, operation, device_blocks, host_slots, limit):
        directory = Path(os.environ[FAULTS])
        if operation is api.TransferOperation.READ and (directory / "slow").exists():
            time.sleep(SLOW_S)
        if operation is api.TransferOperation.READ and (directory / "fail").exists():
            super().move(operation, device_blocks[:1], host_slots[:1], limit)
            raise errors.TransferError("the test wants it")
        if operation is api.TransferOperation.WRITE and (directory / "full").exists():
            raise errors.TransferError("the test wants it")
        super().move(operation, device_blocks, host_slots, limit)


tier_worker.LayerMemory = FaultyMemory
DynamoConnector = tier_connector.DynamoConnector
