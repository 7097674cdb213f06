"""A server of embeddings for tests: it answers what a test makes of the texts."""

import asyncio
import contextlib

import msgspec

CONFIG = """
default_model: general
encoders: {{embeddings_url: "{url}", embeddings_model: m, timeout_seconds: 5}}
embedding_rules: [{{name: cars, threshold: 0.9, candidates: [engine trouble]}}]
decisions:
  - name: car_decision
    rules: {{conditions: [{{type: embedding, name: cars}}]}}
    modelRefs: [{{model: mechanic}}]
"""
VECTORS = {"engine trouble": [3.0, 4.0], "my car stalls": [6.0, 8.1], "hello": [-4.0, 3.0]}


@contextlib.asynccontextmanager
async def serving(answer):
    """Yield the address of a server whose answers `answer` makes of the texts, and the heads of its requests."""
    heads = []

    async def respond(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        request = msgspec.json.decode(await reader.readexactly(length))
        assert request["model"] == "m"
        with contextlib.suppress(ConnectionError):
            writer.write(answer(request["input"]))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", heads


def embeddings(texts):
    rows = [{"index": n, "embedding": VECTORS[text]} for n, text in enumerate(texts)]
    return b"HTTP/1.0 200 OK\r\n\r\n" + msgspec.json.encode({"data": rows[::-1]})
