"""The sink of an engine with remote prefills: it tracks the cached prefixes, and adds reports to outputs.

Neither costs anything per token: the worker's own method takes the outputs, except while a request that asked for a
report is answered. Outputs carry the report from the end of the copy on, which may come after the first of them.
"""

from collections.abc import Callable, Sequence

import msgspec

from dynamo.base import errors
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.protocols import blocks, generate, kv_events, kv_transfer


class CachedPrefixes:
    """The reusable blocks of the local engine, by its KV events, so that no other worker computes them.

    It lags one step behind, which costs at most a wrong estimate: what is really cached is decided when the sequence
    gets its blocks.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def apply_events(self, events: Sequence[kv_events.KvEvent]) -> None:
        """Apply the events of one step."""
        for event in events:
            match event:
                case kv_events.Stored(blocks=stored):
                    self._hashes.update(block.block_hash for block in stored)
                case kv_events.Removed(block_hashes=hashes):
                    self._hashes.difference_update(hashes)
                case kv_events.Cleared():
                    self._hashes.clear()

    def count_tokens(self, token_ids: bytes, block_size: int, seed: int = blocks.SEED) -> int:
        """Return how many of these packed tokens are cached; `seed` is that of `blocks.seed_of`."""
        names = blocks.sequence_hashes(blocks.local_hashes(token_ids, block_size, seed))
        num_blocks = next(
            (i for i, name in enumerate(names) if name not in self._hashes), len(names)
        )
        return num_blocks * block_size


class RemotePrefillSink:
    """An `api.EngineSink` in front of the worker's own."""

    def __init__(self, sink: api.EngineSink, cached: CachedPrefixes) -> None:
        self.outputs: Callable[[Sequence[api.EngineOutput]], None] = sink.outputs
        self.died = sink.died
        self._sink, self._cached = sink, cached
        self._prefill_s: dict[str, float | None] = {}  # by id of a running request with a report
        self._reports: dict[str, kv_transfer.TransferReport] = {}

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Apply and pass on the events of one step."""
        self._cached.apply_events(events)
        self._sink.kv_events(events, dp_rank)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Pass on the failure of a request."""
        self.forget_request(request_id)
        self._sink.failed(request_id, error)

    def expect_import(self, request: generate.Request, prefill_s: float | None) -> None:
        """Prepare a report if the request asks for it; `prefill_s` None: this worker did not request the prefill."""
        if kv_transfer.REPORT_ANNOTATION in request.annotations:
            self._prefill_s[request.id] = prefill_s
            self.outputs = self._outputs_with_reports

    def add_import(self, report: sharing.ImportReport, worker_id: int | None) -> None:
        """Add the report of a finished copy to the request's outputs from now on."""
        if report.request_id in self._prefill_s:
            prefill_s = self._prefill_s[report.request_id]
            self._reports[report.request_id] = kv_transfer.TransferReport(
                transfer_ms=report.duration_s * 1000,
                num_blocks=report.num_blocks,
                prefill_worker_id=worker_id,
                prefill_ms=None if prefill_s is None else prefill_s * 1000,
            )

    def forget_request(self, request_id: str) -> None:
        """Drop the report of a request that has ended."""
        self._prefill_s.pop(request_id, None)
        self._reports.pop(request_id, None)
        if not self._prefill_s:
            self.outputs = self._sink.outputs

    def _outputs_with_reports(self, batch: Sequence[api.EngineOutput]) -> None:
        self._sink.outputs([self._add_report(item) for item in batch])
        for request_id, output in batch:
            if output.finish_reason is not None:
                self.forget_request(request_id)

    def _add_report(self, item: api.EngineOutput) -> api.EngineOutput:
        report = self._reports.get(item.request_id)
        if report is None:
            return item
        params = kv_transfer.KvTransferParams(report=report)
        output = msgspec.structs.replace(item.output, kv_transfer_params=params)
        return item._replace(output=output)
