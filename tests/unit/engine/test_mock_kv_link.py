"""The simulated network between workers."""

import pytest

from dynamo.base import errors
from dynamo.engine.mock.engine import KvLink
from dynamo.kvbm import sharing
from dynamo.protocols import blocks, generate, kv_transfer


class Stopwatch:
    """Sleeps at once, and counts."""

    def __init__(self):
        self.slept_s = 0.0

    async def sleep(self, duration_s):
        self.slept_s += duration_s


def link(**changed):
    clock = Stopwatch()
    settings = {"bytes_per_second": 1e9, "bytes_per_block": 10**6, "fail_every": 0}
    return clock, KvLink(clock, **(settings | changed))


def pull(num_blocks):
    ids = tuple(range(num_blocks))
    remote = kv_transfer.RemoteBlocks(
        remote_block_ids=ids, remote_engine_id="e", remote_host="", remote_port=0, remote_hold_id=1
    )
    request = generate.Request(id="r", model="m", token_ids=blocks.pack([1]))
    return sharing.KvImport(
        import_id=1,
        request=request,
        remote=remote,
        local_blocks=ids,
        remote_blocks=ids,
        num_tokens=1,
    )


async def test_copy_takes_as_long_as_its_bytes():
    clock, slow = link()
    await slow.wait(pull(500), 5.0)

    assert clock.slept_s == pytest.approx(0.5)


async def test_copy_without_a_bandwidth_takes_no_time():
    clock, fast = link(bytes_per_second=0)
    await fast.wait(pull(500), 5.0)

    assert clock.slept_s == 0


async def test_copy_fails_at_its_time_limit():
    clock, slow = link()

    with pytest.raises(errors.TransferError, match=r"longer than 0\.2 s"):
        await slow.wait(pull(500), 0.2)
    assert clock.slept_s == pytest.approx(0.2)


async def test_every_nth_copy_fails_if_configured():
    _, broken = link(fail_every=3)
    fates = []
    for _ in range(6):
        try:
            await broken.wait(pull(1), 5.0)
            fates.append("copied")
        except errors.TransferError:
            fates.append("failed")

    assert fates == ["copied", "copied", "failed"] * 2
