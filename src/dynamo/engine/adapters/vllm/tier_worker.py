"""The worker's half of the tier connector: the memory of one rank, and the copies between it and the tiers.

vLLM's cache is a tensor for each layer, whose first dimension is the block. What a block holds beyond that is the
attention kernel's own affair (on a CPU even its packing), so whole blocks are copied and nothing is converted.

Loads that vLLM waits for are made before its step; all others by threads beside it (`kvbm.tier_copies`). A copy out of
vLLM's memory begins after the step that computes the blocks.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynamo.base import errors
from dynamo.engine.adapters.vllm.tier_plan import EndedCopy, OpenedStorage, TierPlan, TierResults
from dynamo.kvbm import host_memory, tier_copies, tier_jobs, tier_setup
from dynamo.protocols import kv_events
from dynamo.transfer import api


class LayerMemory:
    """The tensors of all layers as an `api.BlockCopier`: a block in the host tier has its layers in order."""

    def __init__(self, layers: Sequence[Any], host: host_memory.HostMemory) -> None:
        self._layers = [
            layer.detach().view(torch.uint8).reshape(len(layer), -1).numpy() for layer in layers
        ]
        slots = torch.frombuffer(host.window.view, dtype=torch.uint8).view(-1, host.block_bytes)
        slabs = slots.split([layer.shape[1] for layer in self._layers], dim=1)
        self._host = [slab.numpy() for slab in slabs]

    def move(
        self,
        operation: api.TransferOperation,
        device_blocks: Sequence[int],
        host_slots: Sequence[int],
        limit: api.TimeLimit,
    ) -> None:
        """Copy the parts of the blocks layer by layer; see `api.BlockCopier`."""
        targets, sources, is_save = self._layers, self._host, False
        if operation is api.TransferOperation.WRITE:
            targets, sources, is_save = sources, targets, True
        for block, slot in zip(device_blocks, host_slots, strict=True):
            limit.remaining_s()
            to, of = (slot, block) if is_save else (block, slot)
            for target, source in zip(targets, sources, strict=True):
                target[to] = source[of]
        limit.remaining_s()


class TierWorker:
    """The tiers of one rank. Used by the thread of vLLM's worker only."""

    def __init__(self, settings: tier_setup.TierConfig, part: str) -> None:
        """`part` names the rank among those that use one directory; empty if it is alone."""
        self._settings, self._part = settings, part
        self._copies: tier_copies.TierCopies | None = None
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._opened: OpenedStorage | None = None
        self._num_usable = 0
        self._ended: dict[int, EndedCopy] = {}
        self._request_by_load: dict[int, str] = {}
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._began_at: float | None = None
        self._step_s: float | None = None

    def open(self, layers: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
        """Open the tiers for vLLM's cache. Raises ConfigError if it lies in memory that cannot be copied yet."""
        tensors = list(layers.values())
        faults = {find_fault(tensor) for tensor in tensors} - {None}
        if faults:
            raise errors.ConfigError(
                f"--connector kvbm: expected KV cache tensors in CPU memory, contiguous, got {faults.pop()}; serve"
                " without tiers: --connector none"
            )
        block_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)
        shapes = {f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors}
        storage = tier_setup.open_storage(
            self._settings,
            block_size=int(fingerprint["block_size"]),
            block_bytes=block_bytes,
            device_bytes=block_bytes * len(tensors[0]),
            fingerprint={
                **fingerprint,
                "layers": f"{len(tensors)} of {' and '.join(sorted(shapes))}",
                "cpu": torch.backends.cpu.get_cpu_capability(),  # the kernels' packing depends on it
            },
            part=self._part,
        )
        self._opened = OpenedStorage(
            block_bytes=block_bytes,
            host=storage.host.slots,
            disk=storage.disk.slots if storage.disk else None,
            is_shared=self._settings.kvbm_sharing_workers > 1,
        )
        device = LayerMemory(tensors, storage.host)
        self._copies = tier_copies.TierCopies(device, storage.host, storage.disk)
        self._copies.open(self._posted.put, self._end, self._add_slots)

    def start_clock(self) -> None:
        """Begin to measure a step, which may or may not come before its loads."""
        self._began_at = time.monotonic()

    def begin_copies(self, tier_plan: TierPlan) -> None:
        """Make the loads that the step needs, and begin those of other requests."""
        copies = self._opened_copies
        if tier_plan.slots is not None:
            copies.renumber(tier_plan.slots)
        if tier_plan.is_disk_cleared:
            copies.forget()
        self._request_by_load.update(tier_plan.request_by_load)
        for copy in tier_plan.copies:
            if copy.path[0] == kv_events.DEVICE:
                continue
            if copy.path[1] == kv_events.DEVICE and copy.waiting not in tier_plan.request_by_load:
                self._end(copy, copies.run(copy))
            else:
                copies.begin(copy)

    def end_step(self, tier_plan: TierPlan) -> None:
        """Begin to copy the blocks out that the step has computed."""
        if tier_plan.num_tokens and self._began_at is not None:
            self._step_s = time.monotonic() - self._began_at
        for copy in tier_plan.copies:
            if copy.path[0] == kv_events.DEVICE:
                self._opened_copies.begin(copy)

    def take_received(self) -> set[str]:
        """Return the requests of loads that have ended, well or not."""
        while not self._posted.empty():
            self._posted.get()()
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Return vLLM's blocks that were not loaded, of the requests that `take_received` has returned."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_results(self) -> TierResults:
        """Return what has happened since the last call, for the scheduler's half."""
        results = TierResults(
            opened=self._opened,
            num_usable=self._num_usable,
            ended=self._ended,
            step_s=self._step_s,
            changes={} if self._copies is None else self._copies.look(),
        )
        self._opened, self._ended, self._step_s = None, {}, None
        return results

    def close(self) -> None:
        """End the copies and close the file."""
        if self._copies is not None:
            self._copies.close()

    @property
    def _opened_copies(self) -> tier_copies.TierCopies:
        assert self._copies is not None, "vLLM registers its cache before the first step"
        return self._copies

    def _end(self, copy: tier_jobs.TierCopy, outcome: tier_copies.CopyOutcome) -> None:
        assert isinstance(copy.waiting, int)
        self._ended[copy.waiting] = EndedCopy(
            failed=outcome.failed,
            seconds=outcome.seconds,
            began_at=outcome.began_at,
            ended_at=outcome.ended_at,
        )
        if copy.path[1] == kv_events.DEVICE:
            self._failed_blocks |= {copy.to_slots[position] for position in outcome.failed}
        request_id = self._request_by_load.pop(copy.waiting, None)
        if request_id is not None:
            self._received.add(request_id)

    def _add_slots(self, num_slots: int) -> None:
        self._num_usable += num_slots


def find_fault(layer: Any) -> str | None:
    """Return why the blocks of a layer cannot be copied; None if they can."""
    if layer.device.type != "cpu":
        return f"one on {layer.device}"
    if not layer.is_contiguous():
        return f"one of shape {tuple(layer.shape)} and strides {layer.stride()}"
    return None
