"""What an operator may have written down of requests: an audit log (what was said) and a request trace (what it cost).

Both are off by default. The variables are the original's.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import config
from dynamo.observability import row_writer
from dynamo.runtime import component

_MILLISECONDS = 1000
_TRACE_STEM = "dynamo-request-trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig(component.RuntimeConfig):
    """Audit log and request trace."""

    audit_sinks: tuple[str, ...] = config.option(
        (),
        env="DYN_AUDIT_SINKS",
        help="write what was asked and answered to these: stderr, jsonl, jsonl_gz",
    )
    audit_output_path: str | None = config.option(
        None, env="DYN_AUDIT_OUTPUT_PATH", help="the audit log's file, without its suffix"
    )
    audit_force_logging: bool = config.option(
        False,
        env="DYN_AUDIT_FORCE_LOGGING",
        help="write every request; by default only those with `store: true`",
    )
    audit_capacity: int = config.option(
        1024, env="DYN_AUDIT_CAPACITY", help="rows that may wait; more are dropped", least=1
    )
    audit_jsonl_buffer_bytes: int = config.option(
        2**20,
        env="DYN_AUDIT_JSONL_BUFFER_BYTES",
        help="bytes after which rows are written",
        least=1,
    )
    audit_jsonl_flush_interval_ms: int = config.option(
        1000, env="DYN_AUDIT_JSONL_FLUSH_INTERVAL_MS", help="how long rows may wait", least=1
    )
    audit_jsonl_gz_roll_bytes: int = config.option(
        2**28, env="DYN_AUDIT_JSONL_GZ_ROLL_BYTES", help="begin a new file after these", least=0
    )
    audit_jsonl_gz_roll_lines: int = config.option(
        0, env="DYN_AUDIT_JSONL_GZ_ROLL_LINES", help="likewise; 0: no limit", least=0
    )
    request_trace: bool = config.option(
        False,
        env="DYN_REQUEST_TRACE",
        help="write when requests came, how long they were and what their blocks are called",
    )
    request_trace_sinks: tuple[str, ...] = config.option(
        ("jsonl_gz",), env="DYN_REQUEST_TRACE_SINKS", help="to these: stderr, jsonl, jsonl_gz"
    )
    request_trace_output_path: str | None = config.option(
        None,
        env="DYN_REQUEST_TRACE_OUTPUT_PATH",
        help=f"its file, without its suffix (default: {_TRACE_STEM} in the directory for temporary files)",
    )
    request_trace_capacity: int = config.option(
        1024, env="DYN_REQUEST_TRACE_CAPACITY", help="rows that may wait; more are dropped", least=1
    )
    request_trace_jsonl_buffer_bytes: int = config.option(
        2**20,
        env="DYN_REQUEST_TRACE_JSONL_BUFFER_BYTES",
        help="bytes after which rows are written",
        least=1,
    )
    request_trace_jsonl_flush_interval_ms: int = config.option(
        1000,
        env="DYN_REQUEST_TRACE_JSONL_FLUSH_INTERVAL_MS",
        help="how long rows may wait",
        least=1,
    )
    request_trace_jsonl_gz_roll_bytes: int = config.option(
        2**28,
        env="DYN_REQUEST_TRACE_JSONL_GZ_ROLL_BYTES",
        help="begin a new file after these",
        least=0,
    )

    @property
    def audit_options(self) -> row_writer.Options:
        """Of the audit log; without sinks there is none."""
        path = self.audit_output_path
        return row_writer.Options(
            variable="DYN_AUDIT_SINKS",
            sinks=self.audit_sinks,
            path=Path(path) if path is not None else None,
            capacity=self.audit_capacity,
            buffer_bytes=self.audit_jsonl_buffer_bytes,
            flush_s=self.audit_jsonl_flush_interval_ms / _MILLISECONDS,
            roll_bytes=self.audit_jsonl_gz_roll_bytes,
            roll_lines=self.audit_jsonl_gz_roll_lines,
        )

    @property
    def request_trace_options(self) -> row_writer.Options:
        """Of the request trace; without sinks there is none."""
        path = self.request_trace_output_path or Path(tempfile.gettempdir(), _TRACE_STEM)
        return row_writer.Options(
            variable="DYN_REQUEST_TRACE_SINKS",
            sinks=self.request_trace_sinks if self.request_trace else (),
            path=Path(path),
            capacity=self.request_trace_capacity,
            buffer_bytes=self.request_trace_jsonl_buffer_bytes,
            flush_s=self.request_trace_jsonl_flush_interval_ms / _MILLISECONDS,
            roll_bytes=self.request_trace_jsonl_gz_roll_bytes,
        )
