"""The hostile clients of `benchmarks.hostile`, in a process of their own: `python -m benchmarks.hostile_clients ...`.

Each kind is a coroutine that attacks once; it is repeated until the time is over. What the server answers is counted by
kind and status and printed as JSON in the end: a client that is refused, or cut off, is what we want.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import other_user

from dynamo.base import clock, errors, membership
from dynamo.protocols import blocks, generate, wire
from dynamo.runtime.backends import tcp

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")
ATTACK_S = 30.0  # of one attack at most
PAUSE_S = 0.02
MB = 2**20
ROWS = (range(4), range(4, 8), range(8, 12), range(12, 16))
SCHEMAS: list[dict[str, object]] = [
    {"type": "integer", "multipleOf": 62615533},
    {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(16)]},
    {"allOf": [{"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in row]} for row in ROWS]},
    {"enum": [f"value {i} {i * i}" for i in range(20_000)]},
    {"type": "string", "pattern": "(a|aa|aaa){1,500}(b|bb){1,500}$"},
    {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    {"$ref": "#"},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
]  # fmt: skip


HOSTILE_TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 5000000000 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ '%5000000000d' % 1 }}",
    "{{ range(99999)|select('in', range(99999)|list)|list }}",
    "{{ ([range(99999)] * 99999)|map('list')|list }}",
)
OTHER_USER_S = 1.0  # for an answer to a process of another user


def hostile_template() -> str:
    """Return a chat template that does what the number says which is its last message."""
    cases = (
        "{% elif messages[-1].content == '" + str(number) + "' %}" + source
        for number, source in enumerate(HOSTILE_TEMPLATES)
    )
    return "{% if false %}" + "".join(cases) + "{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is attacked, and with which key.

    `cluster` has the addresses that discovery knows (`test_other_users.addresses`), `transfer_port` is that of a pool
    of KV blocks, `hostile_model` has the template of `hostile_template`.
    """

    host: str
    port: int
    worker_port: int
    transfer_port: int
    key: str
    model: str
    hostile_model: str
    cluster: dict[str, object]
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
            {"chat_template": target.draw.choice(HOSTILE_TEMPLATES)},
            {"messages": [{"role": "assistant", "content": "{{ 7 * 7 }}{% for x in range(10**9) %}"}, message]},
        )
    )  # fmt: skip
    body = target.chat(max_tokens=2, **fields)
    return await send(target, target.head(PATHS[0], len(body)), body)


async def templates_of_a_model(target: Target) -> str:
    """Ask the model whose own template computes or grows without end."""
    content = str(target.draw.randrange(len(HOSTILE_TEMPLATES)))
    messages = [{"role": "user", "content": content}]
    body = target.chat(model=target.hostile_model, messages=messages, max_tokens=2)
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
    """Send an ordinary request with some bytes changed, to the frontend or to a port of a worker."""
    body = target.chat(stream=True, max_tokens=5)
    data = bytearray(target.head(PATHS[0], len(body)) + body)
    for _ in range(target.draw.randrange(1, 20)):
        data[target.draw.randrange(len(data))] = target.draw.randrange(256)
    port = target.draw.choice((target.port, target.worker_port, target.transfer_port))
    return await send(target, bytes(data), port=port)


async def random_frames(target: Target) -> str:
    """Send random frames to the worker's request plane, or to its pool of KV blocks."""
    frames = [target.draw.randbytes(target.draw.randrange(1, 4096)) for _ in range(20)]
    lengths = [len(frame).to_bytes(4, target.draw.choice(("big", "little"))) for frame in frames]
    pieces = (length + frame for length, frame in zip(lengths, frames, strict=True))
    return await send(
        target, *pieces, port=target.draw.choice((target.worker_port, target.transfer_port))
    )


class _Speaker(asyncio.Protocol):
    """Sends its bytes as soon as it is admitted, and says when the other side has closed the connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.is_closed = asyncio.Event()
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed.set()


async def mutated_frames(target: Target) -> str:
    """Send requests with some bytes changed to the worker's request plane, as a member that has the local token."""
    request = generate.Request(
        id=f"mutated-{target.draw.random()}",
        model=target.model,
        token_ids=blocks.pack([1, 2, 3]),
        stop_conditions=generate.StopConditions(max_tokens=5),
    )
    endpoint = next(iter(target.cluster["instances"]))
    frames = [wire.encode(wire.Hello(wire.VERSION, "mutated"))]
    for stream in range(10):
        opening = wire.Open(stream, endpoint, msgspec.Raw(msgspec.msgpack.encode(request)))
        data = bytearray(wire.encode(opening))
        for _ in range(target.draw.randrange(1, 4)):
            data[target.draw.randrange(len(data))] = target.draw.randrange(256)
        frames.append(bytes(data))
    speaker = _Speaker(b"".join(frames))
    settings = membership.ClusterConfig(file_kv=str(target.cluster["directory"]))
    network = tcp.TcpNetwork(
        credentials=membership.read(settings, os.environ), time=clock.SystemClock()
    )
    try:
        await network.connect(f"{target.host}:{target.worker_port}", lambda: speaker)
        async with asyncio.timeout(1):
            await speaker.is_closed.wait()
    except TimeoutError:
        return "open"
    except errors.DynamoError as error:
        return type(error).__name__
    finally:
        if speaker.transport is not None:
            speaker.transport.abort()
    return "closed"


async def another_user(target: Target) -> str:
    """Generate, clear caches, hear events, copy blocks and read the token as another user of the host."""
    if os.getuid() != 0:
        await asyncio.sleep(ATTACK_S)
        return "skipped: only root can act as another user"
    attempts = json.dumps(target.cluster | {"wait_s": OTHER_USER_S})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(other_user.__file__)),
        attempts,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:  # the time of the attack is over
            process.kill()
    results = json.loads(output.splitlines()[-1]) if output else {"start": "failed"}
    await asyncio.sleep(10)  # it takes seconds of a core to start
    return ", ".join(sorted(name for name in results if results[name] != "refused")) or "refused"


ATTACKS: tuple[Callable[[Target], Awaitable[str]], ...] = (
    large_bodies, bodies_without_a_key, endless_chunks, slow_bodies, schemas, templates, templates_of_a_model,
    slow_readers, floods, mutated_requests, random_frames, mutated_frames, another_user,
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
    """Attack what standard input describes for some seconds, and print the outcomes, both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    target = Target(draw=random.Random(options.seed), **json.load(sys.stdin))
    json.dump(asyncio.run(attack(target, options.seconds)), sys.stdout)


if __name__ == "__main__":
    main()
