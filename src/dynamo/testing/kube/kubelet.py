"""The node: it takes pods that fit, runs them as local processes, and answers for their logs."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, BinaryIO, cast

from dynamo.testing.kube import (
    api,
    builtin_checks,
    builtin_rules,
    calls,
    container_usage,
    failures,
    metadata,
    pod_runner,
    pod_streams,
    resources,
    service_network,
    store,
)

Object = dict[str, Any]
_PODS = ("", "pods")
_NODES = ("", "nodes")
_CLAIMS = ("", "persistentvolumeclaims")
_SOURCES = (("", "configmaps"), ("", "secrets"))  # of volumes
_NAME = "laptop"
_FOLLOW_S = 0.2
_MEMORY_S = 1.0  # between two looks at the memory of containers
_PIECE_BYTES = 2**16
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}  # of a cordon
_CONDITIONS = (
    ("Ready", "True", "KubeletReady"),
    ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID"),
)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What pods may request together."""

    amounts: dict[str, str] = field(
        default_factory=lambda: {
            "cpu": "64",
            "memory": "256Gi",
            "pods": "500",
            "nvidia.com/gpu": "8",
            "ephemeral-storage": "256Gi",
        }
    )


class Kubelet:
    """A controller of pods: schedules them to the one node, and keeps a runner for each."""

    def __init__(
        self, served: api.Api, node: pod_runner.NodeContext, capacity: NodeCapacity
    ) -> None:
        self._api = served
        self._node = node
        self._capacity = capacity
        self._runners: dict[str, pod_runner.PodRunner] = {}
        self._endings: dict[str, float] = {}  # the shortest grace period by uid

    @property
    def names(self) -> service_network.ServiceNetwork:
        """The addresses and names of services, a controller of its own."""
        return self._node.names

    def _resource(self, plural: str) -> resources.ApiResource:
        return self._api.registry.require("", plural)

    async def register(self) -> None:
        """Create the Node object."""
        now = metadata.timestamp()
        nodes = self._resource("nodes")
        labels = {
            "kubernetes.io/hostname": _NAME,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        await self._api.create(nodes, "", {"metadata": {"name": _NAME, "labels": labels}})
        times = {"message": "", "lastHeartbeatTime": now, "lastTransitionTime": now}
        address = {"type": "InternalIP", "address": self._node.network.host}
        version = {"kubeletVersion": "v1.33.0", "containerRuntimeVersion": "process://1"}
        status = {
            "addresses": [address, {"type": "Hostname", "address": _NAME}],
            "capacity": self._capacity.amounts,
            "allocatable": self._capacity.amounts,
            "conditions": [
                {"type": kind, "status": value, "reason": reason, **times}
                for kind, value, reason in _CONDITIONS
            ],
            "nodeInfo": {**version, "operatingSystem": "linux", "osImage": "processes"},
        }
        options = api.WriteOptions(manager="kubelet", subresource="status")
        await self._api.patch(nodes, "", _NAME, api.MERGE_PATCH, {"status": status}, options)

    async def watch_memory(self) -> None:
        """Kill containers that hold more memory than their limit."""
        while True:
            await self._node.clock.sleep(_MEMORY_S)
            limited = [runner for runner in self._runners.values() if runner.has_memory_limit]
            processes = container_usage.read_processes() if limited else {}
            for runner in limited:
                runner.kill_oversized(processes)

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the pod or claim that changed, and the pods that a change of another object may concern."""
        if change.table in _SOURCES and change.type != "DELETED":
            yield from map(
                _key, self._api.store.list_items(_PODS, change.item["metadata"]["namespace"])
            )
        if change.table == _PODS or (change.table == _CLAIMS and change.type == "DELETED"):
            yield _key(change.item)
        if change.table == _NODES or (
            change.table == _PODS and (change.type == "DELETED" or _has_ended(change.item))
        ):
            for pod in self._api.store.list_items(_PODS):
                if not pod["spec"].get("nodeName"):
                    yield _key(pod)

    async def reconcile(self, key: Hashable) -> float | None:
        """Schedule, start or end one pod, or remove what a claim that has gone had."""
        namespace, name, uid = cast("tuple[str, str, str]", key)
        pod = self._api.store.get(_PODS, (namespace, name))
        runner = self._runners.get(uid)
        if pod is None or pod["metadata"]["uid"] != uid:
            if runner is not None:
                self._end(runner, 0)
            else:
                claimed = self._node.folder / "claims" / uid
                await asyncio.to_thread(shutil.rmtree, claimed, ignore_errors=True)
        elif not pod["spec"].get("nodeName"):
            await self._schedule(pod)
        elif pod["metadata"].get("deletionTimestamp"):
            if runner is not None:
                runner.pod = pod
                self._end(runner, pod["metadata"].get("deletionGracePeriodSeconds", 30))
            elif uid not in self._endings:
                await self._remove(pod)
        elif runner is None and not _has_ended(pod):
            if notices := "; ".join(builtin_checks.notices(self._resource("pods"), pod)):
                await self.warn(pod, "FieldsWithoutEffect", notices)
            self._runners[uid] = pod_runner.PodRunner(
                pod,
                self._node,
                lambda kind, name: self._api.find("v1", kind, namespace, name),
                self._write_status,
                self.warn,
            )
        elif runner is not None:
            runner.pod = pod
            runner.refresh_volumes()
        return None

    async def _schedule(self, pod: Object) -> None:
        meta = pod["metadata"]
        if meta.get("deletionTimestamp") or pod["spec"].get("schedulingGates"):
            return
        node = (self._api.store.get(_NODES, ("", _NAME)) or {}).get("spec", {})
        obstacles = [f"Insufficient {name}" for name in self._lacking(pod)]
        if taint := _find_untolerated(pod, node.get("taints") or ()):
            text = f"{taint.get('key')}: {taint.get('value', '')}"
            obstacles.insert(0, f"node(s) had untolerated taint {{{text}}}")
        if node.get("unschedulable") and _find_untolerated(pod, (_UNSCHEDULABLE,)):
            obstacles.insert(0, "node(s) were unschedulable")
        if not obstacles:
            await self._api.bind(meta["namespace"], meta["name"], _NAME)
            await self.tell(
                pod,
                "Scheduled",
                f"Successfully assigned {meta['namespace']}/{meta['name']} to {_NAME}",
            )
            return
        text = f"0/1 nodes are available: 1 {', 1 '.join(obstacles)}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text,
                     "lastTransitionTime": metadata.timestamp()}  # fmt: skip
        before = (pod.get("status") or {}).get("conditions") or [{}]
        if before[0].get("message") != text:
            await self._write_status(pod, {**pod["status"], "conditions": [condition]})
            await self.tell(pod, "FailedScheduling", text, kind="Warning")

    def _lacking(self, pod: Object) -> list[str]:
        """Return the resources of which too little is free for a pod."""
        used: dict[str, Decimal] = {}
        for candidate in self._api.store.list_items(_PODS):
            if candidate["spec"].get("nodeName") and not _has_ended(candidate):
                _add_requests(used, candidate)
        desired: dict[str, Decimal] = {}
        _add_requests(desired, pod)
        return [
            name
            for name, amount in sorted(desired.items())
            if amount
            and amount + used.get(name, 0)
            > builtin_rules.parse_quantity(self._capacity.amounts.get(name, "0"))
        ]

    async def tell(self, pod: Object, reason: str, message: str, kind: str = "Normal") -> None:
        """Write an event about a pod."""
        body = builtin_rules.new_event(pod, reason, message, "kubelet", kind)
        await self._api.create(self._resource("events"), pod["metadata"]["namespace"], body)

    async def warn(self, pod: Object, reason: str, message: str) -> None:
        """Write a warning about a pod, unless its namespace is ending."""
        with contextlib.suppress(failures.ApiError):
            await self.tell(pod, reason, message, kind="Warning")

    async def _write_status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        options = api.WriteOptions(manager="kubelet", subresource="status")
        with contextlib.suppress(failures.ApiError):  # the pod may be gone
            current = await self._api.get(self._resource("pods"), meta["namespace"], meta["name"])
            if current["metadata"]["uid"] == meta["uid"] and current.get("status") != status:
                body = {**current, "status": status}
                await self._api.update(
                    self._resource("pods"), meta["namespace"], meta["name"], body, options
                )

    def _end(self, runner: pod_runner.PodRunner, grace_s: float) -> None:
        uid, name = runner.pod["metadata"]["uid"], runner.pod["metadata"]["name"]
        if uid not in self._endings:
            self._node.running.start(f"end of {name}", self._finish(runner, grace_s))
        elif grace_s < self._endings[uid]:
            self._node.running.start(f"sooner end of {name}", runner.stop(grace_s))
        self._endings[uid] = min(grace_s, self._endings.get(uid, grace_s))

    async def _finish(self, runner: pod_runner.PodRunner, grace_s: float) -> None:
        uid = runner.pod["metadata"]["uid"]
        await runner.stop(grace_s)
        await self._remove(runner.pod)
        self._runners.pop(uid, None)
        self._endings.pop(uid, None)

    async def _remove(self, pod: Object) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(failures.ApiError):
            options = api.DeleteOptions(grace_s=0, uid=meta["uid"])
            await self._api.delete(self._resource("pods"), meta["namespace"], meta["name"], options)

    async def close(self) -> None:
        """End the processes of all pods."""
        runners = [runner for uid, runner in self._runners.items() if uid not in self._endings]
        await asyncio.gather(*(runner.stop(1) for runner in runners))
        self._node.remove_folders()

    # What the API server asks of it.

    def processes_of(self, pod: Object) -> dict[str, int]:
        """Return the first process of each running container of a pod."""
        runner = self._runners.get(pod["metadata"]["uid"])
        return runner.processes() if runner is not None else {}

    async def serve_pod(self, call: calls.ApiCall, pod: Object, subresource: str) -> bool:
        """Answer a request for a pod's subresource; return False for one that is not served."""
        runner = self._runners.get(pod["metadata"]["uid"])
        if subresource in ("portforward", "exec"):
            if runner is None or not runner.address:
                text = f"pod {pod['metadata']['name']} does not run: wait until it does"
                raise failures.bad_request(text)
            pod_streams.PodStreams(call, runner, subresource, self._node.running)
            return True
        if subresource == "attach":
            text = (
                "this cluster does not attach to containers: use kubectl logs -f, or kubectl exec"
            )
            raise failures.bad_request(text)
        if subresource != "log":
            return False
        name, is_previous = _container_of(call, pod), call.query.flag("previous")
        path: Any = runner.log_path(name, is_previous=is_previous) if runner else None
        if runner is None or not path.exists():
            text = f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: ContainerCreating'
            raise failures.bad_request(text)
        if any(map(call.query.get, ("sinceSeconds", "sinceTime"))) or call.query.flag("timestamps"):
            text = "--since, --since-time and --timestamps have no effect: the times of lines are not kept here"
            call.warnings.append(text)
        call.exchange.start_stream(200, content_type="text/plain", headers=call.warning_headers)
        call.exchange.send_head()
        pid = None if is_previous else runner.processes().get(name)
        with path.open("rb") as file:
            await _send_log(call, file, lambda: pid and runner.processes().get(name) == pid)
        call.exchange.end()
        return True


def _key(pod: Object) -> tuple[str, str, str]:
    meta = pod["metadata"]
    return meta["namespace"], meta["name"], meta["uid"]


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _container_of(call: calls.ApiCall, pod: Object) -> str:
    """Return the container of which a request wants the log. Raises ApiError (400)."""
    spec, pod_name, name = pod["spec"], pod["metadata"]["name"], call.query.get("container")
    regular, first = (
        [container["name"] for container in spec.get(field) or ()]
        for field in ("containers", "initContainers")
    )
    if not name and len(regular) > 1:
        choices = f"choose one of: [{' '.join(regular)}]"
        text = f"a container name must be specified for pod {pod_name}, {choices}"
        raise failures.bad_request(text)
    if name and name not in (*regular, *first):
        raise failures.bad_request(f"container {name} is not valid for pod {pod_name}")
    return name or str(regular[0])


async def _send_log(call: calls.ApiCall, file: BinaryIO, is_running: Callable[[], Any]) -> None:
    """Send a log as fast as the client reads; one that is followed, until its container has ended."""
    tail, remaining = call.query.number("tailLines"), call.query.number("limitBytes")
    if tail is not None and tail >= 0:
        await asyncio.to_thread(_seek_lines, file, tail)
    while not call.exchange.is_closed and remaining != 0:
        is_over = not (call.query.flag("follow") and is_running())
        piece = file.read(min(_PIECE_BYTES, remaining or _PIECE_BYTES))
        await call.exchange.send(piece)
        if remaining is not None:
            remaining -= len(piece)
        if not piece and is_over:
            return
        if not piece:
            await asyncio.sleep(_FOLLOW_S)
            if os.fstat(file.fileno()).st_size < file.tell():  # it was emptied
                file.seek(0)


def _seek_lines(file: BinaryIO, count: int) -> None:
    """Go to the last lines of a file, which is read from its end."""
    end = file.seek(0, os.SEEK_END)
    if not count or not end:
        return
    file.seek(end - 1)
    end -= file.read(1) == b"\n"
    while end:
        begin = file.seek(max(end - _PIECE_BYTES, 0))
        _, *lines = file.read(end - begin).rsplit(b"\n", count)
        if len(lines) == count:
            file.seek(end - len(b"\n".join(lines)))
            return
        count, end = count - len(lines), begin
    file.seek(0)


def _find_untolerated(pod: Object, taints: Iterable[Object]) -> Object | None:
    """Return the first taint that keeps a pod from a node, or None if it tolerates all of them."""
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in taints:
        is_hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if is_hard and not any(_tolerates(toleration, taint) for toleration in tolerations):
            return taint
    return None


def _tolerates(toleration: Object, taint: Object) -> bool:
    """Return True if a toleration matches a taint; what it leaves out matches everything, but for the value."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    is_any_value = toleration.get("operator") == "Exists"
    return is_any_value or toleration.get("value", "") == taint.get("value", "")


def _add_requests(amounts: dict[str, Decimal], pod: Object) -> None:
    amounts["pods"] = amounts.get("pods", Decimal(0)) + 1
    for container in pod["spec"]["containers"]:
        for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
            amounts[name] = amounts.get(name, Decimal(0)) + builtin_rules.parse_quantity(value)
