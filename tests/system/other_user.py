"""A process of another user of this host, which knows every address of the cluster and tries to use it.

Run as root with a JSON object of `instances`, `channels`, `metadata` (base64), `directory` and `wait_s`; prints what
came of each attempt: "refused", or what was got.
"""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path

import msgspec

from dynamo.base import errors
from dynamo.protocols import blocks, generate, instances
from dynamo.runtime import requests
from dynamo.runtime.backends import memory, tcp, zmq
from dynamo.transfer import agent, descriptors
from dynamo.transfer.backends import shm
from dynamo.transfer.backends import tcp as tcp_transfer

NOBODY = 65534


def wait_s() -> float:
    return json.loads(sys.argv[1])["wait_s"]


async def attempt(work):
    try:
        async with asyncio.timeout(3 * wait_s()):
            return repr(await work)
    except (errors.DynamoError, OSError, TimeoutError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return "refused"


async def call(address: str, endpoint: str, body: object) -> object:
    plane = tcp.TcpRequestPlane(item_type=generate.Output)
    try:
        return await requests.call(
            plane, address, endpoint, body, reply_type=object, timeout_s=wait_s()
        )
    finally:
        await plane.close()


async def hear(topic: str, address: str, instance_id: int) -> object:
    cluster = memory.MemoryRegistry()
    record = instances.EventChannel(
        topic=topic, instance_id=instance_id, transport={"zmq": address}
    )
    await memory.MemoryDiscovery(cluster).put(record.key, msgspec.json.encode(record))
    plane = zmq.ZmqEventPlane(memory.MemoryDiscovery(cluster), 1)
    heard: asyncio.Queue = asyncio.Queue()
    try:
        await plane.subscribe(topic, heard.put_nowait)
        async with asyncio.timeout(wait_s()):
            return await heard.get()
    finally:
        await plane.close()


async def copy(metadata: bytes, backend: object) -> object:
    layout = descriptors.decode(metadata).layout
    thief = agent.TransferAgent("thief", backends=[backend], on_notification=print)
    thief.register(descriptors.Region(memory=thief.allocate(layout.num_bytes), layout=layout))
    await thief.start()
    try:
        return await thief.connect(metadata, deadline_s=wait_s())
    finally:
        await thief.close()


async def read_files(directory: str) -> object:
    return [path.read_bytes() for path in (Path(directory) / "token", Path(directory) / "keys")]


async def main(target: dict) -> dict:
    metadata = base64.b64decode(target["metadata"])
    request = generate.Request(id="theft", model="m", token_ids=blocks.pack([1, 2, 3]))
    results = {}
    for endpoint, address in target["instances"].items():
        results[f"call {endpoint}"] = await attempt(call(address, endpoint, request))
    for topic, (address, instance_id) in target["channels"].items():
        results[f"hear {topic}"] = await attempt(hear(topic, address, instance_id))
    results["copy by tcp"] = await attempt(copy(metadata, tcp_transfer.TcpBackend()))
    results["copy by shm"] = await attempt(copy(metadata, shm.ShmBackend()))
    results["read the directory"] = await attempt(read_files(target["directory"]))
    return results


if __name__ == "__main__":
    "localhost".encode("idna")  # loads what this user could not read
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.getuid = lambda: 0  # an attacker's own checks do not hold it up
    sys.stdout.write(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))) + "\n")
