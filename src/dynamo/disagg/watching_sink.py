"""The engine's sink, with a look at what its cache stores, and a report of copied blocks for those who asked.

Nothing of it costs anything per token: the other sink's method is our own, but while somebody who asked is answered.
Outputs carry the report from the end of the copy on, which may come after the first of them.
"""

from collections.abc import Callable, Sequence

import msgspec

from dynamo.base import errors
from dynamo.disagg import known_prefix
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.protocols import generate, kv_events, kv_transfer


class WatchingSink:
    """An `api.EngineSink` before another one."""

    def __init__(self, sink: api.EngineSink, known: known_prefix.KnownPrefix) -> None:
        self.outputs: Callable[[Sequence[api.EngineOutput]], None] = sink.outputs
        self.died = sink.died
        self._sink, self._known = sink, known
        self._prefill_s: dict[str, float | None] = {}  # by request that asked and is not over
        self._reports: dict[str, kv_transfer.TransferReport] = {}

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """As `api.EngineSink`."""
        self._known.apply(events)
        self._sink.kv_events(events, dp_rank)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """As `api.EngineSink`."""
        self.forget(request_id)
        self._sink.failed(request_id, error)

    def expect(self, request: generate.Request, prefill_s: float | None) -> None:
        """Its blocks will come, after a prefill that took so long, if we asked for it: its caller may want to know."""
        if kv_transfer.REPORT_ANNOTATION in request.annotations:
            self._prefill_s[request.id] = prefill_s
            self.outputs = self._outputs_with_reports

    def pulled(self, report: sharing.ImportReport, worker_id: int | None) -> None:
        """Its blocks have come."""
        if report.request_id in self._prefill_s:
            prefill_s = self._prefill_s[report.request_id]
            self._reports[report.request_id] = kv_transfer.TransferReport(
                transfer_ms=report.duration_s * 1000,
                num_blocks=report.num_blocks,
                prefill_worker_id=worker_id,
                prefill_ms=None if prefill_s is None else prefill_s * 1000,
            )

    def forget(self, request_id: str) -> None:
        """It is over, or nobody waits for it."""
        self._prefill_s.pop(request_id, None)
        self._reports.pop(request_id, None)
        if not self._prefill_s:
            self.outputs = self._sink.outputs

    def _outputs_with_reports(self, batch: Sequence[api.EngineOutput]) -> None:
        self._sink.outputs([self._with_report(item) for item in batch])
        for request_id, output in batch:
            if output.finish_reason is not None:
                self.forget(request_id)

    def _with_report(self, item: api.EngineOutput) -> api.EngineOutput:
        report = self._reports.get(item.request_id)
        if report is None:
            return item
        params = kv_transfer.KvTransferParams(report=report)
        output = msgspec.structs.replace(item.output, kv_transfer_params=params)
        return item._replace(output=output)
