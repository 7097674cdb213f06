"""A worker's system port with routes by which an operator tells it something, and who hears that."""

import contextlib

import httpx

from dynamo.worker import system


class Told:
    """Notes what it is told and answers `said`; raises `failure`, if there is one."""

    said: object = None

    def __init__(self):
        self.heard, self.failure = [], None

    def told(self, *what):
        if self.failure is not None:
            raise self.failure
        self.heard.append(what)
        return self.said


@contextlib.asynccontextmanager
async def client_of(routes, path=""):
    """Asks, below this path, a system port that has these routes beside its own."""
    served = system.SystemPort(
        endpoints=("generate",),
        is_ready=lambda: True,
        uptime_s=lambda: 0.0,
        render=lambda: b"",
        beside=routes,
    )
    port = await served.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}{path}") as client:
        yield client
    await served.close()
