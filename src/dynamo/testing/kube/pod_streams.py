"""kubectl port-forward and kubectl exec: the streams of a client, connected to a pod's ports and commands."""

import asyncio
import contextlib
import json
import os
import termios
from collections.abc import Callable
from typing import Any

from dynamo.base import tasks
from dynamo.testing.kube import calls, failures, pod_runner, pods, spdy

_PROTOCOLS = {"portforward": "portforward.k8s.io", "exec": "v4.channel.k8s.io"}


class PodStreams:
    """The streams of one request for a pod's `portforward` or `exec`; ApiError (400) refuses it."""

    def __init__(
        self,
        call: calls.ApiCall,
        runner: pod_runner.PodRunner,
        subresource: str,
        running: tasks.Tasks,
    ) -> None:
        self._call = call
        self._runner = runner
        self._running = running
        self._is_exec = subresource == "exec"
        query = call.query
        name = query.get("container") or runner.states[0].spec["name"]
        containers = {state.spec["name"]: state.spec for state in (*runner.inits, *runner.states)}
        if name not in containers:
            text = f"container {name} is not valid for pod {runner.pod['metadata']['name']}"
            raise failures.bad_request(text)
        self._container = containers[name]
        self._kinds = {"error"} | {k for k in ("stdin", "stdout", "stderr") if query.flag(k)}
        if query.flag("tty"):  # both kinds of output go to one stream
            self._kinds = (self._kinds | {"resize"}) - {"stderr"}
        self._streams: dict[str, spdy.SpdyStream] = {}
        self._session = spdy.SpdySession(call.exchange, self._take_stream)
        protocol = _PROTOCOLS[subresource]
        headers = call.request.headers
        offers = {name.strip() for name in headers.get("x-stream-protocol-version", "").split(",")}
        if headers.get("upgrade", "").lower() != "spdy/3.1" or protocol not in offers:
            raise failures.bad_request(f"expected an upgrade to SPDY/3.1 with {protocol}")
        call.exchange.on_disconnect(self._session.close)
        answer = (
            ("connection", "Upgrade"),
            ("upgrade", "SPDY/3.1"),
            ("x-stream-protocol-version", protocol),
        )
        call.exchange.switch_protocol(answer, self._session.receive)

    def _take_stream(self, stream: spdy.SpdyStream) -> None:
        kind, request = stream.headers.get("streamtype", ""), stream.headers.get("requestid", "")
        self._streams[f"{kind} {request}" if request else kind] = stream
        if self._is_exec and self._kinds <= self._streams.keys():
            self._running.start("kubectl exec", self._execute(stream))
        elif self._is_exec or kind == "error":
            stream.accept()
        else:
            errors_of = self._streams.pop(f"error {request}", None)
            self._streams.pop(f"data {request}")
            self._running.start("kubectl port-forward", self._forward(stream, errors_of))

    def _attach(self, stream: spdy.SpdyStream, sink: asyncio.StreamWriter) -> None:
        """Let the bytes of a stream go to `sink`, which ends if the client has gone meanwhile."""
        stream.sink = sink
        if self._call.exchange.is_closed:
            sink.close()

    async def _forward(self, stream: spdy.SpdyStream, errors_of: spdy.SpdyStream | None) -> None:
        port = stream.headers.get("port", "")
        try:
            reader, writer = await self._runner.connect(int(port))
        except (OSError, ValueError) as error:
            stream.accept()
            stream.end()
            if errors_of is not None:  # kubectl knows these words, and keeps its other connections
                text = f"failed to connect to localhost:{port} of the pod: {error}"
                errors_of.end(text.encode())
            return
        self._attach(stream, writer)
        stream.accept()
        with contextlib.suppress(OSError):
            await stream.copy_from(reader)
        if errors_of is not None:
            errors_of.end()

    async def _execute(self, last: spdy.SpdyStream) -> None:
        """Run the command; the client sends no input before its last stream is accepted."""
        is_terminal = self._call.query.flag("tty")
        run = self._run_at_terminal if is_terminal else self._run_with_pipes
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        try:
            code = await run(self._call.query.all("command"), last)
        except (OSError, ValueError, pods.MissingReference) as error:  # it cannot be started
            text = f"error executing command in container: {error}"
            status |= {"status": "Failure", "reason": "InternalError", "message": text}
            last.accept()
            for kind in self._streams.keys() & {
                "stdout",
                "stderr",
            }:  # the client reads to their ends
                self._streams[kind].end()
            code = 0
        if code:
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
            }
        self._streams["error"].end(json.dumps(status).encode())

    async def _run_with_pipes(self, command: list[str], last: spdy.SpdyStream) -> int:
        streams = self._streams
        process = await self._runner.open_command(self._container, command)
        assert process.stdin is not None
        if "stdin" in streams:
            self._attach(streams["stdin"], process.stdin)
        else:
            process.stdin.close()
        last.accept()
        copies = [
            streams[kind].copy_from(output)
            for kind, output in (("stdout", process.stdout), ("stderr", process.stderr))
            if kind in streams and output is not None
        ]
        await asyncio.gather(*copies)
        return await process.wait()

    async def _run_at_terminal(self, command: list[str], last: spdy.SpdyStream) -> int:
        """Run a command at a terminal, which hangs up when the client goes."""
        streams, loop = self._streams, asyncio.get_running_loop()
        process, terminal = await self._runner.open_terminal(self._container, command)
        reader = asyncio.StreamReader()
        output, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(terminal, "rb", buffering=0)
        )
        typed, protocol = await loop.connect_write_pipe(
            lambda: _TypedInput(output.close), os.fdopen(os.dup(terminal), "wb", buffering=0)
        )
        if "stdin" in streams:
            self._attach(streams["stdin"], asyncio.StreamWriter(typed, protocol, None, loop))
        streams["resize"].on_bytes = lambda data: _set_size(terminal, data)
        last.accept()
        try:
            await streams["stdout"].copy_from(reader)
        except OSError:  # so a terminal ends that no process has open any more
            streams["stdout"].end()
        typed.close()
        return await process.wait()


class _TypedInput(asyncio.streams.FlowControlMixin):
    """What the client types; `hang_up` is called when no more can come."""

    def __init__(self, hang_up: Callable[[], None]) -> None:
        super().__init__()
        self._hang_up = hang_up

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hang_up()


def _set_size(terminal: int, data: bytes) -> None:
    with contextlib.suppress(ValueError, KeyError, OSError):
        size = json.loads(data)
        termios.tcsetwinsize(terminal, (size["Height"], size["Width"]))
