"""The traffic that a frontend recorded with `--request-trace`, as a workload to replay.

A row is written when its request ends, so the rows of several files are put in the order of arrival first. A prompt is
known by the hashes of its full blocks, which become the names of its blocks. What has no hash is in blocks of its own,
which no other prompt has: what follows the last full block, and what follows the first image, which a frontend does not
hash. Requests that ended in an error are replayed with the tokens they got.
"""

import gzip
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.simulate.workload import MOST_TOKENS, SimulatedRequest, Trace

SCHEMA = "dynamo.request.trace.v1"
_SUFFIXES = (".jsonl", ".jsonl.gz")
_AUDIT_ROW = b'{"schema_version"'  # as it begins in the audit log of the same frontend
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Replay(msgspec.Struct):
    trace_block_size: int
    input_length: _Tokens
    input_sequence_hashes: list[int]

    def __post_init__(self) -> None:
        size, num_hashes = self.trace_block_size, len(self.input_sequence_hashes)
        if size < 1 or self.input_length < 1 or num_hashes > self.input_length // size:
            raise ValueError(
                f"expected a hash for each full block of a prompt, got {num_hashes} for"
                f" {self.input_length} tokens in blocks of {size}"
            )


class TracedRequest(msgspec.Struct):
    """One request as the frontend saw it. Rows of the original's frontend lack some of these fields."""

    request_received_ms: float
    output_tokens: _Tokens = 0
    model: str = ""
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    error_type: str | None = None
    replay: _Replay | None = None


class _Row(msgspec.Struct):
    schema: str = ""
    event_type: str = ""
    request: TracedRequest | None = None


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """The requests of one model in the order of arrival, and the trace to replay, which has one for each of them."""

    requests: Sequence[TracedRequest]
    trace: Trace


def is_recorded(path: Path) -> bool:
    """Return True for a directory, a compressed file, or one with rows of a frontend. Raises ConfigError."""
    if path.is_dir() or path.name.endswith(".gz"):
        return True
    return SCHEMA.encode() in next(_lines(path), b"")


def read_traffic(
    paths: Sequence[Path], *, model: str | None = None, limit: int | None = None
) -> RecordedTraffic:
    """Read files, and all in directories but audit logs; `limit` is the most requests.

    Raises ConfigError, which names the file.
    """
    rows: list[TracedRequest] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
            files = [file for file in files if not next(_lines(file), b"").startswith(_AUDIT_ROW)]
            if not files:
                raise errors.ConfigError(
                    f"--trace {path}: expected files {' or '.join(_SUFFIXES)} in it"
                )
        rows += [row for file in files for row in _read_file(file)]
    models = sorted({row.model for row in rows})
    if model is None and len(models) > 1:
        raise errors.ConfigError(f"--model: expected one of {', '.join(models)}")
    rows = [row for row in rows if model in (None, row.model)]
    rows.sort(key=lambda row: row.request_received_ms)
    rows = rows[:limit]
    if not rows or rows[0].request_received_ms == rows[-1].request_received_ms:
        of = f" of {model}" if model is not None else ""
        raise errors.ConfigError(
            f"--trace {' '.join(map(str, paths))}: expected requests{of} at two times at least,"
            f" got {len(rows)}" + (f"; recorded are {', '.join(models)}" if models else "")
        )
    sizes = sorted({row.replay.trace_block_size for row in rows if row.replay is not None})
    if len(sizes) > 1:
        raise errors.ConfigError(
            f"--trace: expected prompts in blocks of one size, got {sizes[0]} and {sizes[-1]} tokens"
        )
    return RecordedTraffic(rows, Trace(list(_arrivals(rows)), sizes[0]))


def _arrivals(rows: Sequence[TracedRequest]) -> Iterator[SimulatedRequest]:
    # names are tokens of simulated prompts, for which a hash is too long
    numbers = itertools.count()
    number_by_hash: defaultdict[int, int] = defaultdict(numbers.__next__)
    begin = rows[0].request_received_ms
    for row in rows:
        assert row.replay is not None, "rows without it are left out"
        names = [number_by_hash[each] for each in row.replay.input_sequence_hashes]
        num_blocks = -(-row.replay.input_length // row.replay.trace_block_size)
        names += (next(numbers) for _ in range(num_blocks - len(names)))
        yield SimulatedRequest(
            at=(row.request_received_ms - begin) / 1e3,
            num_tokens=row.replay.input_length,
            num_output=max(1, row.output_tokens),
            names=names,
        )


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Let the requests arrive `factor` times as fast."""
    arrivals = [replace(arrival, at=arrival.at / factor) for arrival in trace.arrivals]
    return Trace(arrivals, trace.block_size)


def _read_file(path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            return  # a frontend was killed while it wrote this row, or is writing it
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise errors.ConfigError(
                f"{path}:{number}: expected a row of a frontend's request trace: {error}"
            ) from error
        if row.schema != SCHEMA:
            raise errors.ConfigError(
                f"{path}:{number}: expected a row of a frontend's request trace, with schema {SCHEMA}"
            )
        is_end = row.event_type == "request_end"
        if is_end and row.request is not None and row.request.replay is not None:
            yield row.request


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. What a frontend that was killed left unfinished at its end is left out."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except EOFError:
        return
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.ConfigError(f"--trace {path}: cannot be read: {reason}") from error
