"""Recorded requests given to two configurations: what would change for whom.

A record is a line of the audit log, or a request itself as one line of JSON. The result never holds a text.
"""

import collections
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo.base import errors
from dynamo.semantic import guards, request_view, router

MAX_LINE = 2**26  # bytes of one record
MOST_EXAMPLES = 20  # of requests that change, by name
ReadRequest = Callable[[router.SemanticRouter, bytes], guards.RequestClassifiers | None]
_CHAT_PATH = "/v1/chat/completions"  # of a request that stands alone
_OF_VECTORS = ("/embed", "/rerank", "/score")  # in paths of requests that are not routed
_DECISIVE = ("decision", "model", "reasoning", "path", "guards", "system prompt")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a trace."""

    name: str  # its id, or the number of its line
    body: bytes
    api: request_view.RequestApi = "chat"


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """How many requests change, in what, and which ones."""

    num_requests: int = 0
    num_changed: int = 0
    num_skipped: int = 0  # lines that are no request
    changes: collections.Counter[str] = field(default_factory=collections.Counter)
    models: collections.Counter[str] = field(default_factory=collections.Counter)  # by the new one
    examples: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the report for a person."""
        yield f"{self.num_requests} requests, {self.num_changed} change, {self.num_skipped} lines are no request"
        for change, number in self.changes.most_common():
            yield f"{number:>6}  {change}"
        for model, number in self.models.most_common():
            yield f"{number:>6}  go to {model}"
        yield from self.examples


def read_requests(path: Path) -> Iterator[RecordedRequest | None]:
    """Yield the requests of a file of JSON lines, which may be gzipped; None for a line that is none.

    Raises ConfigError for a file that cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if line.strip():
                    yield _read_request(line, number)
    except (OSError, EOFError, zlib.error) as error:
        raise errors.ConfigError(
            f"{path}: expected a readable file of JSON lines: {error}"
        ) from error


def _read_request(line: bytes, number: int) -> RecordedRequest | None:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    request = row.get("request", row) if isinstance(row, dict) else None
    if not isinstance(request, dict) or "model" not in request:
        return None
    path = str(row.get("path") or _CHAT_PATH)
    if any(word in path for word in _OF_VECTORS):
        return None
    if path == "/invocations":  # SageMaker's, of several APIs
        path = _CHAT_PATH if "messages" in request else "/v1/completions"
    name = row.get("request_id") or f"line {number}"
    return RecordedRequest(str(name), msgspec.json.encode(request), request_view.api_of(path))


def compare(
    requests: Iterator[RecordedRequest | None],
    new: router.SemanticRouter,
    old: router.SemanticRouter | None,
    read: ReadRequest = lambda made, body: None,
) -> ReplayReport:
    """Return what the new configuration changes; without an old one, only where requests go.

    `read` returns the classifiers of a request, after the router's encoders have read it; None: the shipped ones.
    """
    report = ReplayReport()
    for request in requests:
        if request is None:
            report.num_skipped += 1
            continue
        report.num_requests += 1
        after = _outcome(new, request, read)
        report.models[after["model"] or after["path"]] += 1
        if old is None:
            continue
        before = _outcome(old, request, read)
        changed = [name for name in _DECISIVE if before[name] != after[name]]
        for name in changed:
            report.changes[f"{name}: {before[name] or 'none'} -> {after[name] or 'none'}"] += 1
        report.num_changed += bool(changed)
        if changed and len(report.examples) < MOST_EXAMPLES:
            report.examples.append(f"{request.name}: {', '.join(changed)}")
    return report


def _outcome(
    made: router.SemanticRouter, request: RecordedRequest, read: ReadRequest
) -> dict[str, str]:
    """Return what becomes of a request, without a word of it."""
    try:
        classifiers = read(made, request.body)
        explanation = made.route(
            request.body, {}, classifiers=classifiers, api=request.api
        ).explanation
    except errors.DynamoError as error:
        return dict.fromkeys(_DECISIVE, "") | {"path": type(error).__name__}
    verdicts = [
        f"{verdict.guard} {verdict.action} {','.join(verdict.labels)}".rstrip()
        for verdict in explanation.verdicts
        if verdict.action != "none"
    ]
    return {
        "decision": explanation.decision,
        "model": explanation.model,
        "reasoning": explanation.reasoning,
        "path": explanation.path,
        "guards": "; ".join(verdicts),
        "system prompt": "injected" if explanation.has_system_prompt else "",
    }
