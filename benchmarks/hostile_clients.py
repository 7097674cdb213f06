"""The hostile clients of `benchmarks.hostile`, in a process of their own: `python -m benchmarks.hostile_clients ...`.

Each kind is a coroutine that attacks once; it is repeated until the time is over. What the server answers is counted by
kind and status and printed as JSON in the end: a client that is refused, or cut off, is what we want.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")
ATTACK_S = 30.0  # of one attack at most
PAUSE_S = 0.02
MB = 2**20
SCHEMAS: list[dict[str, object]] = [
    {"type": "integer", "multipleOf": 62615533},
    {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(16)]},
    {"enum": [f"value {i} {i * i}" for i in range(20_000)]},
    {"type": "string", "pattern": "(a|aa|aaa){1,500}(b|bb){1,500}$"},
    {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    {"$ref": "#"},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is attacked, and with which key."""

    host: str
    port: int
    worker_port: int
    key: str
    model: str
    draw: random.Random = field(default_factory=random.Random)

    def head(self, path: str, length: int | str, *, has_key: bool = True, more: str = "") -> bytes:
        """Return the head of a request with a body."""
        key = f"authorization: Bearer {self.key}\r\n" if has_key else ""
        framing = length if isinstance(length, str) else f"content-length: {length}"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}content-type: application/json\r\n{more}"
        return f"{head}{framing}\r\n\r\n".encode()

    def chat(self, **fields: object) -> bytes:
        """Return the body of a chat."""
        messages = [{"role": "user", "content": "hi"}]
        return json.dumps({"model": self.model, "messages": messages, **fields}).encode()


async def send(
    target: Target, *pieces: bytes, pause_s: float = 0.0, port: int | None = None
) -> str:
    """Send these bytes and read to the end; return the status, or how it ended."""
    reader, writer = await asyncio.open_connection(target.host, port or target.port)
    try:
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if writer.can_write_eof() and port is not None:
                writer.write_eof()
        except ConnectionError:  # refused while it talks: there may be an answer all the same
            pass
        with contextlib.suppress(ConnectionError):
            first = await reader.read(65536)
            return first[9:12].decode("latin-1") if first.startswith(b"HTTP/") else "closed"
        return "reset"
    finally:
        writer.transport.abort()


async def large_bodies(target: Target) -> str:
    """Send 57 MB of lists, or nearly as much as the limit: of lists, of nesting, of text, of numbers."""
    size = target.draw.choice((57 * MB, 8 * MB - 100, 4 * MB))
    unit = target.draw.choice(
        (b"[],", b"[", b'{"a":', b"1,", b'{"":0},', b'"x",', b"\\u0000", b"x")
    )
    body = b'{"model":"' + target.model.encode() + b'","messages":[' + unit * (size // len(unit))
    pieces = (body[start : start + MB] for start in range(0, len(body), MB))
    return await send(target, target.head(target.draw.choice(PATHS), len(body)), *pieces)


async def bodies_without_a_key(target: Target) -> str:
    """Send a large body without a key, at once or behind `Expect: 100-continue`."""
    expect = target.draw.choice(("", "expect: 100-continue\r\n"))
    head = target.head(target.draw.choice(PATHS), 64 * MB, has_key=False, more=expect)
    return await send(target, head, *[b"x" * MB] * 64)


async def endless_chunks(target: Target) -> str:
    """Send chunks without end."""
    head = target.head(PATHS[0], "transfer-encoding: chunked")
    return await send(target, head, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 1000)


async def slow_bodies(target: Target) -> str:
    """Send a body of 8 MB byte by byte."""
    return await send(target, target.head(PATHS[0], 8 * MB), *[b"x"] * 200, pause_s=0.1)


async def schemas(target: Target) -> str:
    """Ask for an answer to a schema that is hard to compile."""
    schema = target.draw.choice(SCHEMAS)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = target.chat(response_format=form, max_tokens=20)
    return await send(target, target.head(PATHS[0], len(body)), body)


async def templates(target: Target) -> str:
    """Ask with many messages, with large or deep arguments of the template, or with many tools."""
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    message = {"role": "user", "content": "x" * target.draw.choice((1, 1000))}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    fields = target.draw.choice(
        (
            {"messages": [message] * 50_000},
            {"chat_template_kwargs": {"deep": deep, "messages": [message] * 10_000}},
            {"tools": [tool] * 128},
            {"messages": [{"role": "assistant", "content": "{{ 7 * 7 }}{% for x in range(10**9) %}"}, message]},
        )
    )  # fmt: skip
    body = target.chat(max_tokens=2, **fields)
    return await send(target, target.head(PATHS[0], len(body)), body)


async def slow_readers(target: Target) -> str:
    """Ask for a long stream and read nothing."""
    body = target.chat(stream=True, n=8, max_tokens=1500, ignore_eos=True)
    _, writer = await asyncio.open_connection(target.host, target.port, limit=1)
    try:
        writer.write(target.head(PATHS[0], len(body)) + body)
        await asyncio.sleep(5)
        return "unread"
    finally:
        writer.transport.abort()


async def floods(target: Target) -> str:
    """Open a hundred connections, and leave: before, within or after a small request."""
    body = target.chat(stream=True, max_tokens=200, logit_bias={"5": 100})
    whole = target.head(PATHS[0], len(body)) + body

    async def visit() -> None:
        _, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(whole[: target.draw.randrange(len(whole) + 1)])
        await asyncio.sleep(target.draw.random() * 0.2)
        writer.transport.abort()

    await asyncio.gather(*(visit() for _ in range(100)), return_exceptions=True)
    return "left"


async def mutated_requests(target: Target) -> str:
    """Send an ordinary request with some bytes changed, to the frontend or to the worker's request plane."""
    body = target.chat(stream=True, max_tokens=5)
    data = bytearray(target.head(PATHS[0], len(body)) + body)
    for _ in range(target.draw.randrange(1, 20)):
        data[target.draw.randrange(len(data))] = target.draw.randrange(256)
    port = target.draw.choice((target.port, target.worker_port))
    return await send(target, bytes(data), port=port)


async def mutated_frames(target: Target) -> str:
    """Send random frames to the worker's request plane."""
    frames = [target.draw.randbytes(target.draw.randrange(1, 4096)) for _ in range(20)]
    lengths = [len(frame).to_bytes(4, target.draw.choice(("big", "little"))) for frame in frames]
    pieces = (length + frame for length, frame in zip(lengths, frames, strict=True))
    return await send(target, *pieces, port=target.worker_port)


ATTACKS: tuple[Callable[[Target], Awaitable[str]], ...] = (
    large_bodies, bodies_without_a_key, endless_chunks, slow_bodies, schemas, templates, slow_readers, floods,
    mutated_requests, mutated_frames,
)  # fmt: skip


async def attack(target: Target, seconds: float) -> dict[str, dict[str, int]]:
    """Run all kinds of attack at once; return the outcomes of each."""
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    ends_at = asyncio.get_running_loop().time() + seconds

    async def repeat(kind: Callable[[Target], Awaitable[str]]) -> None:
        while asyncio.get_running_loop().time() < ends_at:
            try:
                async with asyncio.timeout(ATTACK_S):
                    outcome = await kind(target)
            except TimeoutError:
                outcome = "no answer in time"
            except OSError as error:
                outcome = type(error).__name__
            outcomes[kind.__name__][outcome] += 1
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(repeat(kind) for kind in ATTACKS))
    return {name: dict(counts) for name, counts in outcomes.items()}


def main() -> None:
    """Attack for some seconds and print the outcomes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("--port", "--worker-port", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    target = Target(
        host=options.host,
        port=options.port,
        worker_port=options.worker_port,
        key=options.key,
        model=options.model,
        draw=random.Random(options.seed),
    )
    json.dump(asyncio.run(attack(target, options.seconds)), sys.stdout)


if __name__ == "__main__":
    main()
