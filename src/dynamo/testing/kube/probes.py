"""Probes of containers, and the programs that stand for images."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dynamo.testing.kube import pods

Object = dict[str, Any]
Execute = Callable[
    [list[str]], Awaitable[int]
]  # runs a command in the container, returns its exit code

# By the last part of the image's name. Two run beside a program that does without them here, and only wait.
_WAITING = ["sh", "-c", "trap 'exit 0' TERM INT; sleep infinity & wait", "sh"]
_PROGRAMS = {
    "etcd": ["etcd"],
    "kube-rbac-proxy": _WAITING,
    "nats": ["nats-server"],
    "nats-server-config-reloader": _WAITING,
    "python": ["python3"],
}


def command_of(container: Object) -> list[str] | None:
    """Return the command line of a container: its own, or that of the program that its image stands for."""
    command, arguments = container.get("command") or [], container.get("args") or []
    if command:
        return [*command, *arguments]
    name = container["image"].partition("@")[0].rpartition("/")[2].partition(":")[0]
    if name in _PROGRAMS:
        return [*_PROGRAMS[name], *arguments]
    return None


_FAILURES = (  # of the connection, of what answers there, and of a command whose variables have gone
    *(OSError, TimeoutError, ValueError, IndexError, pods.MissingReference),
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
)


@dataclass(slots=True)
class ProbeCount:
    """How often in a row a probe has succeeded or failed."""

    successes: int = 0
    failures: int = 0

    def add(self, is_success: bool) -> None:
        self.successes = self.successes + 1 if is_success else 0
        self.failures = 0 if is_success else self.failures + 1


async def check(probe: Object, container: Object, address: str, execute: Execute) -> bool:
    """Run a probe once; a failure of any kind, or too long a wait, is False."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            return await act(probe, container, address, execute)
    return False


async def act(handler: Object, container: Object, address: str, execute: Execute) -> bool:
    """Do once what a probe or a lifecycle hook says; a failure of any kind is False."""
    with contextlib.suppress(*_FAILURES):
        if "exec" in handler:
            return await execute(handler["exec"]["command"]) == 0
        if "sleep" in handler:
            await asyncio.sleep(handler["sleep"]["seconds"])
            return True
        if "grpc" in handler:
            target = handler["grpc"]
            return await _is_serving(address, target["port"], target.get("service") or "")
        target = handler.get("httpGet") or handler.get("tcpSocket") or {}
        port = pods.container_port(container, target.get("port"))
        host = target.get("host") or address
        if "httpGet" in handler:
            return 200 <= await _get_status(host, port, target) < 400
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False


async def _get_status(host: str, port: int | None, target: Object) -> int:
    tls = None
    if target.get("scheme", "HTTP").upper() == "HTTPS":
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # as a kubelet does
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        extra = "".join(f"{h['name']}: {h['value']}\r\n" for h in target.get("httpHeaders") or ())
        head = f"GET {target.get('path', '/')} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: kube-probe/1.33\r\n"
        writer.write(f"{head}{extra}Connection: close\r\n\r\n".encode())
        line = await reader.readuntil(b"\r\n")
        return int(line.split()[1])
    finally:
        writer.close()


_SERVING = b"\x08\x01"  # a HealthCheckResponse


async def _is_serving(host: str, port: int, service: str) -> bool:
    """Ask the health service of a gRPC server for the state of one service; an empty name means the whole server."""
    import grpc.aio  # few pods have such probes

    name = service.encode()
    request = b"\n" + bytes((len(name),)) + name  # a HealthCheckRequest; no name has 128 bytes
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        try:
            response = await channel.unary_unary("/grpc.health.v1.Health/Check")(request)
        except grpc.aio.AioRpcError:
            return False
    return bool(response.startswith(_SERVING))
