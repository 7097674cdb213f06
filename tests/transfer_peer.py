"""A worker with a pool full of known bytes, to move blocks from and to: a process of its own, or within the test's."""

import asyncio
import importlib
import importlib.util
import multiprocessing
import os
import random
import signal
import threading
from multiprocessing import connection

import hosts
import msgspec
import pytest

import members
import processes
from dynamo.base import config, membership
from dynamo.transfer import agent, descriptors
from dynamo.transfer.backends import local, shm, tcp
from waiting import PATIENT_S

LAYOUT = descriptors.Layout(
    num_blocks=1024, block_size=4, num_layers=3, num_kv_heads=4, head_dim=8, dtype="float16"
)
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="NIXL is not installed: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1",
)
NIXL = pytest.param("nixl", marks=needs_nixl)
# Peers are forked from a process that has imported what they need: 0.7 s of processor time, with NIXL 2.5 s.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "asyncio",
        "pytest",
        "dynamo.base.membership",
        "dynamo.transfer.backends.tcp",
        "dynamo.transfer.backends.shm",
        "dynamo.transfer.backends.nixl",
    ]
)


def content(seed):
    """What a pool is filled with."""
    return random.Random(seed).randbytes(LAYOUT.num_bytes)


def blocks_of(pool, blocks, layout=LAYOUT):
    """The bytes of these blocks, each in all its layers, by the layout's definition."""
    return [
        b"".join(
            pool[at : at + layout.slab_bytes]
            for layer in range(layout.num_layers)
            for at in [layer * layout.layer_stride + block * layout.block_stride]
        )
        for block in blocks
    ]


class Worker:
    """An agent, its pool and what it heard."""

    def __init__(self, name, backend, *, seed, layout=LAYOUT):
        self.heard, self.layout = [], layout
        self.agent = agent.TransferAgent(
            name, backends=[backend], on_notification=lambda *said: self.heard.append(said)
        )
        self.pool = self.agent.allocate(layout.num_bytes)
        self.pool[:] = random.Random(seed).randbytes(layout.num_bytes)
        self.agent.register(descriptors.Region(memory=self.pool, layout=layout))

    async def start(self):
        await self.agent.start()
        return self

    @property
    def metadata(self):
        return self.agent.export_metadata()

    async def close(self):
        await self.agent.close()


class ProcessPeer:
    """A worker in another process, on the host where it is made; what is asked of it blocks, briefly."""

    def __init__(self, backend, *, seed=2, options=None, changes=None):
        self._control, theirs = FORKSERVER.Pipe()
        place = hosts.own_namespace(), dict(os.environ)
        self._process = FORKSERVER.Process(
            target=run,
            args=(theirs, place, backend, seed, options or {}, changes or {}),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self.metadata = self._control.recv()

    @property
    def pid(self):
        return self._process.pid

    def content(self):
        return self._ask("content")

    def heard(self):
        return self._ask("heard")

    def num_descriptors(self):
        return self._ask("descriptors")

    def freeze(self):
        processes.freeze(self.pid)

    def resume(self):
        """Returns when it works again, or has died of it: UCX ends a process whose reader gave up."""
        os.kill(self.pid, signal.SIGCONT)
        self._control.send("heard")
        connection.wait([self._control, self._process.sentinel], 10)

    def kill(self):
        self._process.kill()
        self._process.join(PATIENT_S)

    def close(self):
        self.kill()
        self._control.close()

    def _ask(self, what):
        self._control.send(what)
        assert self._control.poll(10), "the peer does not answer"
        return self._control.recv()


class LocalPeer:
    """The same within the test's process."""

    def __init__(self, worker):
        self.worker, self.metadata = worker, worker.metadata

    def content(self):
        return bytes(self.worker.pool)

    def heard(self):
        return self.worker.heard


def make_backend(name, room=None, **options):
    """By its name, and how it knows its peers: "tcp", "tcp-token" ..."""
    kind, _, how = name.partition("-")
    if kind == "local":
        return local.LocalBackend(room)
    if kind == "nixl":
        return nixl_backend(**options)
    kinds = {"shm": shm.ShmBackend, "tcp": tcp.TcpBackend}
    return kinds[kind](credentials=credentials(how), **options)


def credentials(how):
    if how == "token":
        return members.with_token()
    settings = config.load(membership.ClusterConfig, prog="peer", argv=())
    return membership.read(settings, {}) if how == "tls" else membership.NO_CREDENTIALS


def nixl_backend(**options):
    """Imported here, because a machine may not have NIXL."""
    return importlib.import_module("dynamo.transfer.backends.nixl").NixlBackend(**options)


def run(control, place, backend, seed, options, changes):
    """The process: the server that forked it may stand on another host, with other variables."""
    namespace, environ = place
    hosts.move_into(namespace)
    os.environ.update(environ)
    asyncio.run(_run(control, backend, seed, options, changes))


async def _run(control, backend, seed, options, changes):
    layout = msgspec.convert({**msgspec.to_builtins(LAYOUT), **changes}, descriptors.Layout)
    made = make_backend(backend, **options)
    worker = await Worker("prefill-0", made, seed=seed, layout=layout).start()
    control.send(worker.metadata)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_answer, args=(control, worker, loop, over), daemon=True).start()
    await over.wait()


def _answer(control, worker, loop, over):
    answers = {
        "content": lambda: bytes(worker.pool),
        "heard": lambda: worker.heard,
        "descriptors": lambda: len(os.listdir("/proc/self/fd")),
    }
    try:
        while True:
            control.send(answers[control.recv()]())
    except EOFError:
        loop.call_soon_threadsafe(over.set)
