"""The other processes that answer at the same port, and what they tell each other.

The kernel deals connections out, so whatever one process alone knows has to be asked for: its metrics, an answer that
it keeps, a threshold that was set there. Each listens at a Unix socket in a directory that only their parent's user can
enter; who is in the directory is a sibling. One that does not answer is left out.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from dynamo.base import errors
from dynamo.runtime.http import exchange, router, server

TIMEOUT_S = 2.0
_ANSWER_BYTES = 64 << 20
_logger = logging.getLogger(__name__)
PeerRoutes = Mapping[tuple[str, str], router.Handler]


class Peers:
    """`own` is our socket; None: we are alone."""

    def __init__(self, own: str | None) -> None:
        self._own = Path(own) if own else None
        self._server: server.HttpServer | None = None

    @property
    def name(self) -> str | None:
        """Of this process among them."""
        return self._own.stem if self._own else None

    async def start(self, routes: PeerRoutes) -> None:
        """Answer the others from now on."""
        if self._own is not None:
            self._server = server.HttpServer(
                router.Router(routes, error_body=server.plain_error), error_body=server.plain_error
            )
            await self._server.start_at(str(self._own))

    async def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._server is not None:
            await self._server.close()

    async def ask(self, method: str, target: str, body: bytes = b"") -> dict[str, bytes]:
        """What each of the others answers, by its name; nothing of those that refuse or do not answer."""
        others = sorted(set(self._own.parent.glob("*.sock")) - {self._own}) if self._own else []
        answers = await asyncio.gather(*(_ask(one, method, target, body) for one in others))
        return {
            one.stem: found for one, found in zip(others, answers, strict=True) if found is not None
        }


async def _ask(path: Path, method: str, target: str, body: bytes) -> bytes | None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _exchange(path, method, target, body)
    except (OSError, TimeoutError, errors.RemoteProtocolError) as error:
        _logger.info("the process at %s does not answer: %r", path.name, error)
        return None


async def _exchange(path: Path, method: str, target: str, body: bytes) -> bytes | None:
    """One HTTP/1.0 request: its answer ends with the connection."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        head = f"{method} {target} HTTP/1.0\r\nhost: sibling\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await _read(reader)
    finally:
        writer.close()
    head_bytes, end, found = answer.partition(b"\r\n\r\n")
    if not end:
        raise errors.RemoteProtocolError("expected an HTTP answer")
    return found if head_bytes.split(b" ", 2)[1] == b"200" else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await reader.read(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > _ANSWER_BYTES:
            raise errors.RemoteProtocolError(f"expected at most {_ANSWER_BYTES} bytes")
    return b"".join(pieces)


def respond_optional(caller: exchange.Exchange, found: bytes | None) -> None:
    """To a sibling: what it asked for, or that it is not here."""
    caller.respond(404 if found is None else 200, found or b"")


WORKER_LABEL = "http_worker"


def merge_metrics(text_by_worker: Mapping[str, str]) -> str:
    """Expositions, by the process that they came from → one exposition."""
    comments: dict[str, dict[str, None]] = {}  # by family; each line once, in order
    samples: dict[str, list[str]] = {}
    for worker, text in text_by_worker.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):  # HELP or TYPE, the name, the rest
                family = line.split(" ", 3)[2]
                comments.setdefault(family, {})[line] = None
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = (line for name in comments for line in (*comments[name], *samples.get(name, ())))
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, worker: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{{WORKER_LABEL}="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{{WORKER_LABEL}="{worker}"}} {value}'
