"""One pod: its folder, volumes and namespace, and its containers as child processes with probes and restarts."""

import asyncio
import contextlib
import functools
import math
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import children, guard
from dynamo.testing.kube import (
    container_init,
    container_usage,
    metadata,
    pod_network,
    pod_volumes,
    pods,
    probes,
    service_network,
)

Object = dict[str, Any]
_LAST_BACKOFF_S = 300.0
_STABLE_S = 600.0
_POLL_S = 0.02
_RETRY_S = 2.0
_LOG_CHECK_S = 10.0
_MAX_LOG_BYTES = 64 * 2**20
_RUN = 'exec "$@" >>"$LOG" 2>&1'  # with LOG and the working directory set by its caller
_QUIET = 'exec "$@" >/dev/null 2>&1'  # else probes would write where the cluster does
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
              "TMPDIR")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What all pods of a node share."""

    folder: Path
    network: pod_network.PodNetwork
    guardian: guard.Guard
    running: tasks.Tasks
    clock: clocks.Clock
    backoff_s: float
    names: service_network.ServiceNetwork
    pod_path: str  # folders of programs, before those of this process
    environ: Callable[[Object], dict[str, str]]  # further variables of a pod's containers
    made_folders: list[Path] = field(default_factory=list)  # mount points that the host lacked

    def remove_folders(self) -> None:
        """Remove mount points; not before all pods have ended, since removing one unmounts it in all of them."""
        for path in reversed(self.made_folders):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


class PodRunner:
    """Runs a pod until it is stopped; `write_status` and `warn` are awaited with statuses and with events."""

    def __init__(
        self,
        pod: Object,
        node: NodeContext,
        lookup: pods.Lookup,
        write_status: Callable[[Object, Object], Awaitable[None]],
        warn: Callable[[Object, str, str], Awaitable[None]],
    ) -> None:
        self.pod = pod
        self.address = ""
        self.is_stopping = False
        self.folder = node.folder / pod["metadata"]["uid"]
        self.states = [pods.ContainerState(spec) for spec in pod["spec"]["containers"]]
        self.inits = [pods.ContainerState(spec) for spec in pod["spec"].get("initContainers") or ()]
        self._node = node
        self._lookup = lookup
        self._volumes = pod_volumes.PodVolumes(self.folder, node.folder, lookup)
        self._write_status = write_status
        self._warn = warn
        self._children: dict[str, children.Child] = {}
        self._hooked: set[str] = set()  # containers with a preStop hook that was run
        self._sandbox: children.Child | None = None
        self._task = node.running.start(f"pod {pod['metadata']['name']}", self._run())

    def log_path(self, container: str, *, is_previous: bool = False) -> Path:
        """Return the file with a container's output."""
        return Path(self.folder, f"{container}.log{'.previous' if is_previous else ''}")

    async def _run(self) -> None:
        (self.folder / "volumes").mkdir(parents=True, exist_ok=True)
        await self._open_sandbox_in_time()
        async with asyncio.TaskGroup() as group:
            if await self._prepare(group):
                running = [
                    group.create_task(self._run_container(state), name=state.spec["name"])
                    for state in self.states
                ]
                await asyncio.wait(running)
            self.is_stopping = True
            await self._end_containers(self.pod["spec"]["terminationGracePeriodSeconds"])

    async def _prepare(self, group: asyncio.TaskGroup) -> bool:
        """Run the containers before the start one after the other; return False if one of them has failed.

        The next one begins when this one has ended or, if it goes on beside the others, has started.
        """
        for state in self.inits:
            if not state.is_sidecar:
                await self._run_container(state, is_init=True)
                if state.state.get("terminated", {}).get("exitCode") != 0:
                    await self._report()
                    return False
                continue
            group.create_task(self._run_container(state), name=state.spec["name"])
            while not (state.is_started or self.is_stopping):
                await self._node.clock.sleep(_POLL_S)
        return True

    async def _open_sandbox_in_time(self) -> None:
        """Open the sandbox, again until what its volumes need is there; the status says what is missing."""
        while True:
            try:
                await self._open_sandbox()
            except (pods.MissingReference, OSError) as error:
                waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                for state in (*self.inits, *self.states):
                    state.state = {"waiting": waiting}
                await self._report()
                await self._node.clock.sleep(_RETRY_S)
            else:
                return

    async def _open_sandbox(self) -> None:
        """Prepare volumes, and start the process that holds the pod's namespaces."""
        mounts = self._volumes.make(self.pod)
        if not self._node.network.is_isolated:
            self.address = await self._node.network.attach(0)
            return
        ready = self.folder / "ready"
        meta, hosts = self.pod["metadata"], self.folder / "hosts"
        hosts.touch()
        lines = [f"hostname {meta['name'][:63]}", "mount -t tmpfs none /dev/shm"]
        lines.append(f"mount --bind '{hosts}' /etc/hosts")
        own = self.folder / "temporary"
        own.mkdir(exist_ok=True)
        lines.append(f"mount -t tmpfs none '{own}'")
        of_host = [source for source, _ in mounts if not source.is_relative_to(self.folder)]
        lines += pod_network.private_folders(own, [*self._shared_folders(), *of_host])
        for source, target in mounts:
            self._node.made_folders.extend(pod_volumes.make_mount_point((source, target)))
            if self._node.folder.is_relative_to(target):  # stays visible below a volume at /tmp
                inner = source / self._node.folder.relative_to(target)
                inner.mkdir(parents=True, exist_ok=True)
                lines.append(f"mount --bind '{self._node.folder}' '{inner}'")
            lines.append(f"mount --rbind '{source}' '{target}'")
        script = " && ".join([*lines, f"touch '{ready}'", "exec sleep infinity"])
        argv = ["unshare", "-n", "-m", "-u", "-i", "sh", "-c", script]
        self._sandbox = await self._start("sandbox", argv, dict(os.environ))
        async with asyncio.timeout(_LAST_BACKOFF_S):
            while not os.access(ready, os.F_OK):
                if self._sandbox.exit_code is not None:
                    raise OSError(
                        f"the kernel refuses one of the mounts {', '.join(t for _, t in mounts)}"
                    )
                await self._node.clock.sleep(_POLL_S)
        self.address = await self._node.network.attach(self._sandbox.pid)
        own = f"127.0.0.1 localhost\n{self.address} {meta['name'][:63]}\n"
        self._node.names.add_pod(hosts, meta["namespace"], own)

    def _shared_folders(self) -> list[Path]:
        """Return what pods share below folders for temporary files: logs, the hub's cache, and further mounts."""
        of_hub = [os.environ[name] for name in ("HF_HOME", "HF_HUB_CACHE") if name in os.environ]
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        return [self._node.folder, *map(Path, (*of_hub, *mounted))]

    def refresh_volumes(self) -> None:
        """Write what has changed in volumes with content of objects; what has gone stays there."""
        self._volumes.refresh(self.pod)

    def _inside(self, command: list[str], container: Object | None = None) -> list[str]:
        """Return a command that runs in the pod's namespaces, and among the processes of a container if it runs."""
        if self._sandbox is None:
            return command
        child = self._children.get(container["name"]) if container else None
        first = container_init.first_process(child.pid) if child else None
        kinds = ["-n", "-m", "-u", "-i", *(["-p"] if first else [])]
        return ["nsenter", "-t", str(first or self._sandbox.pid), *kinds, "--", *command]

    async def _start(self, name: str, argv: list[str], environ: dict[str, str]) -> children.Child:
        spec = children.ChildSpec(
            name=f"{self.pod['metadata']['name']}/{name}",
            argv=argv,
            environ=environ,
            is_relayed=False,
        )
        return await children.start(spec, self._node.guardian, self._node.running, self._node.clock)

    def environ(self, container: Object) -> dict[str, str]:
        """Return the environment of a container. Raises MissingReference."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        folders = [self._node.pod_path, str(Path(sys.executable).parent)]
        path = ":".join(filter(None, [*folders, inherited.get("PATH", os.defpath)]))
        own = pods.environment(self.pod, container, self.address, self._lookup)
        own = {name: self._relocate(value) for name, value in own.items()}
        home = {"HOME": str(self.folder), "HOSTNAME": self.pod["metadata"]["name"]}
        return {**inherited, **home, "PATH": path, **self._node.environ(self.pod), **own}

    def _command(self, container: Object) -> tuple[list[str], dict[str, str]]:
        """Return the command line and environment of a container, and rotate its log. Raises MissingReference."""
        command = probes.command_of(container)
        assert command is not None
        environ = self.environ(container)
        folder = Path(self._relocate(container.get("workingDir") or str(self.folder)))
        folder = folder if folder.is_dir() else self.folder
        log = self.log_path(container["name"])
        if log.exists():
            log.replace(self.log_path(container["name"], is_previous=True))
        log.touch()
        argv = [self._relocate(pods.expand(word, environ)) for word in command]
        shell = ["sh", "-c", f'cd "$DIR" && {_RUN}', "sh", *argv]
        return shell, {**environ, "LOG": str(log), "DIR": str(folder)}

    def _relocate(self, text: str) -> str:
        """Replace paths of volumes by their folders, and all addresses by the pod's, where it has no namespaces."""
        if self._sandbox is not None:
            return text
        return self._volumes.relocate(text) or text.replace("0.0.0.0", self.address)

    async def _run_container(self, state: pods.ContainerState, *, is_init: bool = False) -> None:
        policy = state.spec.get("restartPolicy") or self.pod["spec"]["restartPolicy"]
        delay_s = self._node.backoff_s
        clock = self._node.clock
        while not self.is_stopping:
            if probes.command_of(state.spec) is None:
                image = state.spec["image"]
                text = f'Back-off pulling image "{image}": no local program stands for it'
                state.state = {"waiting": {"reason": "ImagePullBackOff", "message": text}}
                await self._report()
                return
            began_at, began = clock.now(), metadata.timestamp()
            exit_code = await self._run_once(state, began, is_init=is_init)
            if exit_code is None:
                await clock.sleep(_RETRY_S)
                continue
            reason = "Completed" if exit_code == 0 else "Error"
            if state.is_out_of_memory:
                reason = "OOMKilled"
            state.is_ready = state.is_started = state.is_out_of_memory = False
            times = {"startedAt": began, "finishedAt": metadata.timestamp()}
            log = self.log_path(state.spec["name"])
            words = self._volumes.read_last_words(state.spec, log, has_failed=exit_code != 0)
            terminated = {"exitCode": exit_code, "reason": reason, **times, **words}
            state.state = {"terminated": terminated}
            is_final = policy == "Never" or (exit_code == 0 and (is_init or policy == "OnFailure"))
            if is_init and exit_code == 0:
                state.is_ready = True
            if is_final or self.is_stopping:
                await self._report()
                return
            if clock.now() - began_at > _STABLE_S:
                delay_s = self._node.backoff_s
            state.last_state, state.restarts = state.state, state.restarts + 1
            if state.restarts > 1:
                name = self.pod["metadata"]["name"]
                text = f"back-off {delay_s:g}s restarting failed container={state.spec['name']} pod={name}"
                state.state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
                await self._report()
                await clock.sleep(delay_s)
                delay_s = min(delay_s * 2, _LAST_BACKOFF_S)

    @property
    def has_memory_limit(self) -> bool:
        """Return True if a container may hold only so much memory."""
        return any(state.memory_limit < math.inf for state in (*self.inits, *self.states))

    def kill_oversized(self, processes: container_usage.Processes) -> None:
        """Kill each container whose processes hold more memory than its limit."""
        for state in (*self.inits, *self.states):
            child = self._children.get(state.spec["name"])
            if child and container_usage.is_beyond(child.pid, processes, state.memory_limit):
                state.is_out_of_memory = True
                child.signal(signal.SIGKILL)

    async def _run_once(
        self, state: pods.ContainerState, began: str, *, is_init: bool
    ) -> int | None:
        """Run a container until it ends; return its exit code, or None if it could not be started yet."""
        try:
            argv, environ = self._command(state.spec)
            message = self._volumes.message_file(state.spec)
            message[0].write_bytes(b"")
            if self._sandbox is not None:
                place = self._volumes.relocate(message[1])
                with contextlib.suppress(OSError):  # only root may make one in /dev
                    folders = pod_volumes.make_mount_point((message[0], place or message[1]))
                    self._node.made_folders.extend([] if place else folders)
            first = self._inside(container_init.command(argv, message))
            child = await self._start(state.spec["name"], first, environ)
        except (pods.MissingReference, OSError, ValueError) as error:  # ValueError: a NUL in it
            kind = "Config" if isinstance(error, pods.MissingReference) else ""
            waiting = {"reason": f"CreateContainer{kind}Error", "message": str(error)}
            state.state = {"waiting": waiting}
            await self._report()
            return None
        self._children[state.spec["name"]] = child
        # if it is stopping, the other containers have been told
        if self.is_stopping or not await self._run_hook(child, state.spec, "postStart"):
            child.signal(signal.SIGKILL)
        state.state = {"running": {"startedAt": began}}
        state.is_started = not is_init and "startupProbe" not in state.spec
        state.is_ready = state.is_started and "readinessProbe" not in state.spec
        await self._report()
        started = asyncio.Event()
        if state.is_started:
            started.set()
        probing = [
            self._node.running.start(
                f"{kind} of {child.spec.name}", self._probe(state, kind, child, started)
            )
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
            if kind in state.spec and not is_init
        ]
        bounding = self._bound_log(self.log_path(state.spec["name"]))
        probing.append(self._node.running.start(f"log of {child.spec.name}", bounding))
        try:
            code = await child.wait()
        finally:
            for task in probing:
                task.cancel()
        self._children.pop(state.spec["name"], None)
        self._hooked.discard(state.spec["name"])
        return code if code >= 0 else 128 - code

    async def _probe(
        self,
        state: pods.ContainerState,
        kind: str,
        child: children.Child,
        started: asyncio.Event,
    ) -> None:
        """Run one probe until its container ends; the others begin as soon as that of the start has succeeded."""
        probe, count, clock = state.spec[kind], probes.ProbeCount(), self._node.clock
        execute = functools.partial(self.execute, state.spec)
        await clock.sleep(probe.get("initialDelaySeconds", 0))
        if kind != "startupProbe":
            await started.wait()
        while not self.is_stopping or kind == "readinessProbe":
            count.add(await probes.check(probe, state.spec, self.address, execute))
            is_failed = count.failures >= probe.get("failureThreshold", 3)
            if kind == "startupProbe" and count.successes:
                state.is_started, state.is_ready = True, "readinessProbe" not in state.spec
                started.set()
                await self._report()
                return
            if kind != "readinessProbe" and is_failed:
                text = f"{kind} of container {state.spec['name']} failed {count.failures} times: it is ended"
                await self._warn(self.pod, "Unhealthy", text)
                grace_s = self.pod["spec"]["terminationGracePeriodSeconds"]
                await self._stop_container(child, state.spec, grace_s)
                return
            is_ready = count.successes >= probe.get("successThreshold", 1)
            if kind == "readinessProbe" and is_ready != state.is_ready and (is_ready or is_failed):
                state.is_ready = is_ready
                await self._report()
            await clock.sleep(probe.get("periodSeconds", 10))

    async def _bound_log(self, path: Path) -> None:
        """Empty the log of a container that runs whenever it is too long."""
        while True:
            await self._node.clock.sleep(_LOG_CHECK_S)
            if os.stat(path).st_size > _MAX_LOG_BYTES:
                os.truncate(path, 0)

    async def execute(self, container: Object, command: list[str]) -> int:
        """Run a command in a container, and end it if the caller waits no longer; return its exit code."""
        argv = ["sh", "-c", _QUIET, "sh", *self._inside(command, container)]
        child = await self._start("exec", argv, self.environ(container))
        try:
            return await child.wait()
        finally:
            child.signal(signal.SIGKILL)

    async def open_command(
        self, container: Object, command: list[str]
    ) -> asyncio.subprocess.Process:
        """Start a command in a container, with pipes for its input and output."""
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._inside(command, container),
            env=self._node.guardian.mark(self.environ(container)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            process_group=0,
        )

    async def open_terminal(
        self, container: Object, command: list[str]
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Start a command in a container at a terminal of its own; return the other end of the terminal too."""
        own_end, other_end = os.openpty()
        environ = {"TERM": "xterm", **self.environ(container)}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._inside(["setsid", "--ctty", "--wait", *command], container),
                env=self._node.guardian.mark(environ),
                stdin=other_end,
                stdout=other_end,
                stderr=other_end,
                process_group=0,
            )
        except OSError:
            os.close(own_end)
            raise
        finally:
            os.close(other_end)
        return process, own_end

    def processes(self) -> dict[str, int]:
        """Return the first process of each running container, those before the start among them."""
        names = [state.spec["name"] for state in (*self.inits, *self.states)]
        return {name: self._children[name].pid for name in names if name in self._children}

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a port of the pod, as from inside. Raises OSError."""
        pid = self._sandbox.pid if self._sandbox is not None else 0
        return await self._node.network.connect(pid, self.address, port)

    async def _report(self) -> None:
        await self._write_status(
            self.pod,
            pods.status_of(self.pod, self.states, self.inits, self.address, metadata.timestamp()),
        )

    async def _end_containers(self, grace_s: float) -> int:
        """End the containers that run, with SIGKILL after the grace period; return how many there were."""
        specs = {state.spec["name"]: state.spec for state in (*self.inits, *self.states)}
        running = [each for each in self._children.items() if each[1].exit_code is None]
        await asyncio.gather(
            *(self._stop_container(child, specs[name], grace_s) for name, child in running)
        )
        return len(running)

    async def _stop_container(
        self, child: children.Child, container: Object, grace_s: float
    ) -> None:
        """Run a container's preStop hook, unless it was run, and end it; both share the grace period."""
        began_at, name = self._node.clock.now(), container["name"]
        if grace_s and name not in self._hooked:
            self._hooked.add(name)
            await self._run_hook(child, container, "preStop", grace_s)
            grace_s = max(grace_s - (self._node.clock.now() - began_at), min(grace_s, _RETRY_S))
        await child.stop(grace_s)

    async def _run_hook(
        self, child: children.Child, container: Object, kind: str, timeout_s: float = math.inf
    ) -> bool:
        """Run a lifecycle hook of a container while it runs; return True unless it failed, which is told of."""
        handler = (container.get("lifecycle") or {}).get(kind)
        if not handler:
            return True
        running, execute = self._node.running, functools.partial(self.execute, container)
        work = probes.act(handler, container, self.address, execute)
        hook = running.start(f"{kind} of {child.spec.name}", work)
        end = running.start(f"{child.spec.name} during {kind}", child.wait())
        try:
            with contextlib.suppress(TimeoutError):
                async with self._node.clock.timeout(timeout_s):
                    await asyncio.wait((hook, end), return_when=asyncio.FIRST_COMPLETED)
            if hook.done() and hook.result():
                return True
        finally:
            hook.cancel()
            end.cancel()
        text = f"{kind} of container {container['name']} failed, or was not done in time"
        await self._warn(self.pod, f"Failed{kind[0].upper()}{kind[1:]}Hook", text)
        return False

    async def stop(self, grace_s: float) -> None:
        """End all containers, with SIGKILL after the grace period, and remove what the pod had."""
        self.is_stopping = True
        if not await self._end_containers(grace_s):
            self._task.cancel()
        await asyncio.wait((self._task,), timeout=_RETRY_S)
        self._task.cancel()
        if self._sandbox is not None:
            self._sandbox.signal(signal.SIGKILL)
            await self._sandbox.wait()
        self._node.names.remove_pod(self.folder / "hosts")
        shutil.rmtree(self.folder, ignore_errors=True)
