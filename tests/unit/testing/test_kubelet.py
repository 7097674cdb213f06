"""The laptop's node: logs, ends and failures of pods, as a kubelet has them. No pod of these tests has a process."""

import asyncio
import errno
import os
import signal
import subprocess
import types

import grpc
import pytest

from dynamo.base import tasks
from dynamo.runtime.http import exchange
from dynamo.testing import clock as clocks
from dynamo.testing.kube import (
    api,
    calls,
    failures,
    garbage,
    kubelet,
    pod_runner,
    pod_streams,
    pod_volumes,
    pods,
    probes,
    resources,
    rights,
    spdy,
    store,
)
from waiting import PATIENT_S, until

PODS = ("", "pods")
MAIN = {
    "name": "main",
    "image": "x:1",
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
}


def make_pod(name="p", *containers, phase="Running", **metadata):
    head = {"namespace": "default", "name": name, "uid": f"uid-{name}", **metadata}
    spec = {"containers": list(containers or [MAIN]), "restartPolicy": "Always"}
    return {"metadata": head, "spec": spec, "status": {"phase": phase}}


class Answer(exchange.Exchange):
    """A request for a log, and the bytes with which it was answered."""

    def __init__(self, query=""):
        request = exchange.Request(
            method="GET", path="/", query=query, headers={}, body=b"", peer="memory"
        )
        super().__init__(request, exchange.NoConnection(), lambda: None)
        self.sent = b""

    def start_stream(self, status, *, content_type, headers=()):
        self.status, self.headers = status, headers

    def send_head(self):
        pass

    def write(self, chunk):
        self.sent += chunk

    def end(self, chunk=b""):
        self.sent += chunk


class Runner:
    """The runner of a pod with files for logs; `pids` are the processes of its containers."""

    def __init__(self, folder, pod):
        self.folder = folder
        self.pod = pod
        self.pids = {}
        self.stops = []
        self.is_stopping = False
        self.has_ended = asyncio.Event()

    def log_path(self, container, *, is_previous=False):
        return self.folder / f"{container}.log{'.previous' if is_previous else ''}"

    def processes(self):
        return self.pids

    def refresh_volumes(self):
        pass

    async def stop(self, grace_s):
        self.stops.append(grace_s)
        await self.has_ended.wait()


@pytest.fixture
def served():
    objects = store.Store()
    return api.Api(resources.ResourceRegistry(), objects, rights.Authority(objects, "token"))


def make_node(served, running=None, *runners):
    context = types.SimpleNamespace(running=running)
    node = kubelet.Kubelet(served, context, kubelet.NodeCapacity())
    node._runners.update({runner.pod["metadata"]["uid"]: runner for runner in runners})
    return node


async def read_log(runner, query="", answer=None):
    answer = answer or Answer(query)
    async with asyncio.timeout(PATIENT_S):
        await make_node(None, None, runner).serve_pod(calls.ApiCall(answer), runner.pod, "log")
    return answer.sent


@pytest.mark.parametrize(
    ("content", "query", "expected"),
    [
        (b"1\n22\n333\n", "tailLines=2", b"22\n333\n"),
        (b"1\n22\n333", "tailLines=2", b"22\n333"),
        (b"1\n22\n", "tailLines=5", b"1\n22\n"),
        (b"\n\n\n", "tailLines=2", b"\n\n"),
        (b"1\n22\n", "tailLines=0", b""),
        (b"", "tailLines=3", b""),
        (b"1\n22\n", "tailLines=-1", b"1\n22\n"),
        (b"1\n22\n333\n", "tailLines=2&limitBytes=4", b"22\n3"),
        (b"1\n22\n333\n", "", b"1\n22\n333\n"),
    ],
)
async def test_log_has_its_last_lines_and_so_many_bytes(
    content, query, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(kubelet, "_PIECE_BYTES", 2, raising=False)
    (tmp_path / "main.log").write_bytes(content)

    assert await read_log(Runner(tmp_path, make_pod()), query) == expected


async def test_followed_log_ends_with_its_container(tmp_path, monkeypatch):
    """So `kubectl logs -f` of a job returns, and so it does at a restart, which begins another log."""
    monkeypatch.setattr(kubelet, "_FOLLOW_S", 0)
    log = tmp_path / "main.log"
    log.write_text("first words\n")
    runner, answer = Runner(tmp_path, make_pod()), Answer("follow=true")
    runner.pids = {"main": 7}
    reading = asyncio.create_task(read_log(runner, answer=answer))
    await until(lambda: answer.sent)
    log.write_text("2\n")  # as after it was emptied
    await until(lambda: answer.sent.endswith(b"2\n"))
    with log.open("a") as file:
        file.write("last\n")
    log.replace(tmp_path / "main.log.previous")
    log.write_text("of another process\n")
    runner.pids = {"main": 8}

    assert await reading == b"first words\n2\nlast\n"
    assert await read_log(runner, "follow=true&previous=true") == b"2\nlast\n"
    runner.pids = {}
    assert await read_log(runner, "follow=true") == b"of another process\n"


@pytest.mark.parametrize(
    ("query", "is_told"),
    [("sinceSeconds=5", True), ("timestamps=true", True), ("tailLines=1", False)],
)
async def test_client_is_told_of_options_of_a_log_that_have_no_effect(tmp_path, query, is_told):
    (tmp_path / "main.log").write_text("1\n")
    answer = Answer(query)

    assert await read_log(Runner(tmp_path, make_pod()), answer=answer) == b"1\n"
    assert [name for name, text in answer.headers if "have no effect" in text] == [
        "warning"
    ] * is_told


async def test_pod_ends_though_its_namespace_takes_no_warning_about_it(served):
    node, pod = make_node(served), {"kind": "Pod", "apiVersion": "v1", **make_pod()}
    await node.warn(pod, "FailedPreStopHook", "lost")
    await served.create(
        served.registry.require("", "namespaces"), "", garbage.new_namespace("default")
    )
    await node.warn(pod, "FailedPreStopHook", "kept")

    assert [e["message"] for e in served.store.list_items(("", "events"))] == ["kept"]


async def test_client_that_attaches_is_told_what_to_use(tmp_path):
    runner = Runner(tmp_path, make_pod())
    with pytest.raises(failures.ApiError, match=r"does not attach to containers: use kubectl logs"):
        await make_node(None, None, runner).serve_pod(calls.ApiCall(Answer()), runner.pod, "attach")


async def test_log_is_that_of_a_container_of_the_pod(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "main.log").write_text("of another pod\n")
    runner = Runner(tmp_path / "own", make_pod())
    with pytest.raises(failures.ApiError, match=r"container \.\./main is not valid for pod p"):
        await read_log(runner, "container=../main")


async def test_log_of_one_of_several_containers_is_asked_for_by_name(tmp_path):
    runner = Runner(tmp_path, make_pod("p", MAIN, {"name": "side", "image": "x:1"}))
    (tmp_path / "main.log").write_text("hello\n")

    assert await read_log(runner, "container=main") == b"hello\n"
    with pytest.raises(failures.ApiError, match=r"for pod p, choose one of: \[main side\]"):
        await read_log(runner)


async def test_forced_deletion_ends_a_pod_that_has_time_left(served, tmp_path):
    times = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 600}
    pod = make_pod(**times)
    pod["spec"]["nodeName"] = "laptop"
    key, place = ("default", "p", "uid-p"), ("default", "p")
    async with tasks.Tasks() as running:
        runner = Runner(tmp_path, pod)
        node = make_node(served, running, runner)
        served.store.put(PODS, pod)
        for _ in range(2):
            await node.reconcile(key)
        await until(lambda: runner.stops)
        served.store.delete(PODS, place)
        for _ in range(2):
            await node.reconcile(key)
        await until(lambda: len(runner.stops) > 1)
        runner.has_ended.set()
        await until(lambda: not node._runners)

    assert runner.stops == [600, 0]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_pod_that_waits_for_room_is_scheduled_when_another_has_ended(served, phase):
    served.store.put(PODS, make_pod("waiting", phase="Pending"))
    changes = []
    served.store.subscribe(changes.append)
    served.store.put(PODS, make_pod("ended", phase=phase))
    keys = make_node(served).keys_of(changes[0])

    assert {name for _, name, _ in keys} == {"ended", "waiting"}


async def test_node_that_is_cordoned_gets_no_pods_until_it_is_free_again(served):
    node, options = make_node(served), api.WriteOptions(manager="kubectl", user=rights.ADMIN)
    nodes, namespaces, plural = (
        served.registry.require("", name) for name in ("nodes", "namespaces", "pods")
    )
    await served.create(namespaces, "", garbage.new_namespace("default"))
    cordoned = {"metadata": {"name": "laptop"}, "spec": {"unschedulable": True}}
    before = await served.create(nodes, "", cordoned, options)
    body = {"metadata": {"name": "waiting"}, "spec": {"containers": [MAIN]}}
    pod = await served.create(plural, "default", body, options)
    (key,) = node.keys_of(store.Change(1, PODS, "ADDED", pod, None))
    await node.reconcile(key)
    kept = served.store.get(PODS, ("default", "waiting"))
    freed = await served.update(nodes, "", "laptop", {**before, "spec": {}}, options)
    assert list(node.keys_of(store.Change(2, nodes.key, "MODIFIED", freed, before))) == [key]
    await node.reconcile(key)

    message = kept["status"]["conditions"][0]["message"]
    assert message == "0/1 nodes are available: 1 node(s) were unschedulable."
    assert served.store.get(PODS, ("default", "waiting"))["spec"]["nodeName"] == "laptop"


TAINT = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "is_placed"),
    [
        (TAINT, None, False),
        (TAINT, {"key": "dedicated", "value": "gpu"}, True),
        (TAINT, {"key": "dedicated", "value": "cpu"}, False),
        (TAINT, {"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        (TAINT | {"effect": "NoExecute"}, None, False),
        (TAINT | {"effect": "PreferNoSchedule"}, None, True),
    ],
)
async def test_tainted_node_gets_only_pods_that_tolerate_it(served, taint, toleration, is_placed):
    node, options = make_node(served), api.WriteOptions(manager="kubectl", user=rights.ADMIN)
    nodes, namespaces, plural = (
        served.registry.require("", name) for name in ("nodes", "namespaces", "pods")
    )
    await served.create(namespaces, "", garbage.new_namespace("default"))
    tainted = {"metadata": {"name": "laptop"}, "spec": {"taints": [taint]}}
    await served.create(nodes, "", tainted, options)
    spec = {"containers": [MAIN]} | ({"tolerations": [toleration]} if toleration else {})
    body = {"metadata": {"name": "p"}, "spec": spec}
    pod = await served.create(plural, "default", body, options)
    (key,) = node.keys_of(store.Change(1, PODS, "ADDED", pod, None))
    await node.reconcile(key)
    found = served.store.get(PODS, ("default", "p"))

    assert found["spec"].get("nodeName") == ("laptop" if is_placed else None)
    if not is_placed:
        assert found["status"]["conditions"][0]["message"] == (
            "0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: gpu}."
        )


async def test_data_of_a_claim_goes_with_it(served, tmp_path):
    node, changes = make_node(served), []
    node._node.folder = tmp_path
    (tmp_path / "claims/uid-data").mkdir(parents=True)
    claim = {"metadata": {"namespace": "default", "name": "p", "uid": "uid-data"}}
    served.store.subscribe(changes.append)
    served.store.put(PODS, make_pod())
    served.store.put(("", "persistentvolumeclaims"), claim)
    served.store.delete(("", "persistentvolumeclaims"), ("default", "p"))
    keys = [list(node.keys_of(change)) for change in changes]
    await node.reconcile(keys[2][0])

    assert keys[1:] == [[], [("default", "p", "uid-data")]]
    assert list((tmp_path / "claims").iterdir()) == []


@pytest.mark.parametrize("answer", [b"hello\r\n\r\n", b"x" * 2**18])
async def test_probe_of_what_is_no_http_server_fails(answer):
    async def serve(reader, writer):
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        probe = {"httpGet": {"port": port}, "timeoutSeconds": PATIENT_S}

        assert not await probes.check(probe, MAIN, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("answer", "is_healthy"),
    [(b"\x08\x01", True), (b"\x08\x02", False), (b"", False), (None, False)],
)
async def test_probe_asks_the_health_service_of_a_grpc_server(answer, is_healthy):
    async def check(request, context):
        if answer is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return answer if request == b"\n\x04main" else b""

    server = grpc.aio.server()
    methods = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)
    server.add_generic_rpc_handlers((health,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    probe = {"grpc": {"port": port, "service": "main"}, "timeoutSeconds": PATIENT_S}
    result = await probes.check(probe, MAIN, "127.0.0.1", None)
    await server.stop(None)

    assert result is is_healthy


async def test_probe_whose_variables_have_gone_fails():
    async def execute(command):
        raise pods.MissingReference('configmap "words" not found')

    assert not await probes.check({"exec": {"command": ["true"]}}, MAIN, "127.0.0.1", execute)


class Child:
    """A process that only a signal ends."""

    pid = 7
    code = -signal.SIGKILL
    spec = types.SimpleNamespace(name="p/main")

    def __init__(self):
        self.signals = []
        self.is_awaited = False
        self.has_ended = asyncio.Event()

    async def wait(self):
        self.is_awaited = True
        await self.has_ended.wait()
        return self.code

    def signal(self, number):
        self.signals.append(number)
        self.has_ended.set()

    @property
    def exit_code(self):
        return self.code if self.has_ended.is_set() else None

    async def stop(self, timeout_s):
        self.signal(signal.SIGTERM)


@pytest.fixture
async def runner(tmp_path):
    """A pod's runner whose containers begin as `start` says."""
    async with tasks.Tasks() as running:
        made = pod_runner.PodRunner.__new__(pod_runner.PodRunner)
        made.pod, made.folder, made.address, made.is_stopping = make_pod(), tmp_path, "", False
        made.states, made.inits = [pods.ContainerState(MAIN)], []
        made._children, made._sandbox = {}, None
        made._node = types.SimpleNamespace(
            running=running, clock=clocks.VirtualClock(), folder=tmp_path, pod_path="",
            environ=lambda pod: {}, backoff_s=1.0,
        )  # fmt: skip
        made._lookup = lambda kind, name: None
        made._volumes = pod_volumes.PodVolumes(
            tmp_path, tmp_path, lambda *names: made._lookup(*names)
        )
        (tmp_path / "volumes").mkdir()
        made._hooked, made.warnings = set(), []
        made._warn = _note_warning(made.warnings)
        made.written = []
        made._write_status = _note_status(made.written)
        made._start = _no_start
        yield made


def _note_status(written):
    async def write_status(pod, status):
        written.append(status)

    return write_status


def _note_warning(warnings):
    async def warn(pod, reason, message):
        warnings.append((reason, message))

    return warn


async def _no_start(name, argv, environ):
    raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))


async def test_command_of_a_probe_ends_when_its_time_is_over(runner):
    child = Child()

    async def start(name, argv, environ):
        return child

    runner._start = start
    probing = asyncio.create_task(runner.execute(MAIN, ["sleep", "infinity"]))
    await until(lambda: child.is_awaited)
    probing.cancel()
    await asyncio.wait([probing])

    assert child.signals == [signal.SIGKILL]


async def test_output_of_a_probe_goes_nowhere(runner):
    child, started = Child(), []

    async def start(name, argv, environ):
        started.append(argv)
        child.has_ended.set()
        return child

    runner._start = start
    await runner.execute(MAIN, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    done = subprocess.run(started[0], capture_output=True, timeout=PATIENT_S)

    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")


async def test_status_says_why_a_container_cannot_be_started(runner):
    (state,) = runner.states
    state.spec = {**MAIN, "command": ["true"]}

    assert await runner._run_once(state, "now", is_init=False) is None
    waiting = runner.written[0]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerError"
    assert "Argument list too long" in waiting["message"]


async def test_container_that_begins_while_its_pod_ends_is_killed(runner):
    child = Child()
    (state,) = runner.states
    state.spec = {**MAIN, "command": ["true"]}

    async def start(name, argv, environ):
        runner.is_stopping = True
        return child

    runner._start = start
    async with asyncio.timeout(PATIENT_S):
        assert await runner._run_once(state, "now", is_init=False) == 128 + signal.SIGKILL
    assert child.signals == [signal.SIGKILL]


def hooked(**lifecycle):
    return {**MAIN, "command": ["true"], "lifecycle": lifecycle}


HOOK = {"exec": {"command": ["hook"]}}


async def test_container_ends_after_its_hook_and_both_share_the_grace_period(runner):
    hook, main, stops = Child(), Child(), []

    async def start(name, argv, environ):
        return hook

    async def stop(grace_s):
        stops.append(grace_s)

    runner._start, main.stop = start, stop
    container = hooked(preStop=HOOK)
    ending = asyncio.create_task(runner._stop_container(main, container, 30))
    await until(lambda: hook.is_awaited)
    await runner._node.clock.advance(12)
    assert stops == []
    sooner = asyncio.create_task(runner._stop_container(main, container, 5))
    await until(lambda: stops)
    hook.code = 0
    hook.has_ended.set()
    await asyncio.wait([ending, sooner])

    assert stops == [5, 18]
    assert runner.warnings == []


@pytest.mark.parametrize("handler", [HOOK, {"sleep": {"seconds": 60}}])
async def test_container_ends_though_its_hook_does_not(runner, handler):
    hook, main = Child(), Child()

    async def start(name, argv, environ):
        return hook

    runner._start = start
    stopping = runner._stop_container(main, hooked(preStop=handler), 30)
    ending = asyncio.create_task(stopping)
    await until(lambda: main.is_awaited)
    await runner._node.clock.advance(31)
    await asyncio.wait([ending])

    assert main.signals == [signal.SIGTERM]
    assert runner.warnings == [
        ("FailedPreStopHook", "preStop of container main failed, or was not done in time")
    ]


async def test_container_that_is_killed_ends_without_its_hook(runner):
    main = Child()
    await runner._stop_container(main, hooked(preStop=HOOK), 0)

    assert main.signals == [signal.SIGTERM]


@pytest.mark.parametrize(("code", "expected"), [(0, []), (1, [signal.SIGKILL])])
async def test_container_whose_hook_fails_at_its_start_is_killed(runner, code, expected):
    main, hook = Child(), Child()
    hook.code = code
    hook.has_ended.set()

    async def start(name, argv, environ):
        return hook if name == "exec" else main

    runner._start = start
    (state,) = runner.states
    state.spec = hooked(postStart=HOOK)
    running = asyncio.create_task(runner._run_once(state, "now", is_init=False))
    await until(lambda: runner.written)
    signals = list(main.signals)
    main.has_ended.set()
    await running

    assert signals == expected
    assert [reason for reason, _ in runner.warnings] == ["FailedPostStartHook"] * code


async def test_pod_that_ends_while_a_hook_of_its_start_runs_keeps_its_grace_period(runner):
    main, hook = Child(), Child()

    async def start(name, argv, environ):
        return hook if name == "exec" else main

    runner._start = start
    (state,) = runner.states
    state.spec = hooked(postStart=HOOK)
    running = asyncio.create_task(runner._run_once(state, "now", is_init=False))
    await until(lambda: hook.is_awaited)
    runner.is_stopping = True
    hook.code = 0
    hook.has_ended.set()
    await until(lambda: runner.written)
    signals = list(main.signals)
    main.has_ended.set()
    await running

    assert signals == []


async def test_events_say_why_a_container_without_life_is_ended(runner):
    probe, main = Child(), Child()
    probe.code = 1
    probe.has_ended.set()

    async def start(name, argv, environ):
        return probe

    runner._start = start
    runner.pod["spec"]["terminationGracePeriodSeconds"] = 1
    (state,) = runner.states
    liveness = {"exec": {"command": ["false"]}, "failureThreshold": 1, "timeoutSeconds": PATIENT_S}
    state.spec = {**MAIN, "livenessProbe": liveness}
    started = asyncio.Event()
    started.set()
    probing = asyncio.create_task(runner._probe(state, "livenessProbe", main, started))
    await runner._node.clock.advance(1)
    await asyncio.wait([probing], timeout=PATIENT_S)

    assert main.signals == [signal.SIGTERM]
    assert runner.warnings == [
        ("Unhealthy", "livenessProbe of container main failed 1 times: it is ended")
    ]


async def test_sidecar_starts_before_the_other_containers_and_ends_after_them(runner):
    """It is a container among those before the start with the restart policy Always."""
    started = {}

    async def start(name, argv, environ):
        started[name] = Child()
        return started[name]

    async def open_sandbox():
        pass

    runner._start, runner._open_sandbox_in_time = start, open_sandbox
    side = {**MAIN, "name": "side", "command": ["true"], "restartPolicy": "Always"}
    runner.inits = [pods.ContainerState({**side, "startupProbe": {"exec": {"command": ["true"]}}})]
    runner.states = [pods.ContainerState({**MAIN, "command": ["true"]})]
    runner.pod["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    work = asyncio.create_task(runner._run())
    await until(lambda: "exec" in started)
    before = list(started)
    started["exec"].code = 0
    started["exec"].has_ended.set()
    await runner._node.clock.advance(1)
    await until(lambda: "main" in started)
    conditions = runner.written[-1]["conditions"]
    started["main"].has_ended.set()
    async with asyncio.timeout(PATIENT_S):
        await work

    assert before == ["side", "exec"]
    assert {c["type"]: c["status"] for c in conditions}["Initialized"] == "True"
    assert started["side"].signals == [signal.SIGTERM]
    assert "terminated" in runner.written[-1]["initContainerStatuses"][0]["state"]


async def test_log_of_a_container_before_the_start_is_followed_while_it_runs(runner):
    first = {"name": "first", "image": "x:1"}
    runner.inits = [pods.ContainerState(first)]
    runner._children["first"] = Child()

    assert runner.processes() == {"first": Child.pid}


async def test_log_that_has_become_too_long_is_emptied(runner, monkeypatch):
    monkeypatch.setattr(pod_runner, "_MAX_LOG_BYTES", 10)
    path, clock = runner.log_path("main"), runner._node.clock
    path.write_text("short\n")
    runner._node.running.start("log", runner._bound_log(path))
    await clock.advance(60)
    kept = path.read_text()
    path.write_text("too long for us\n")
    await clock.advance(60)

    assert (kept, path.read_text()) == ("short\n", "")


async def test_status_of_a_pod_without_an_address_is_written(served):
    """Else the status would not say what a volume lacks, for which the pod waits before it has an address."""
    options = api.WriteOptions(manager="kubelet", subresource="status")
    plural = served.registry.require("", "pods")
    await served.create(
        served.registry.require("", "namespaces"), "", garbage.new_namespace("default")
    )
    body = {"metadata": {"name": "p"}, "spec": {"containers": [MAIN]}}
    pod = await served.create(plural, "default", body)
    state = pods.ContainerState(MAIN, state={"waiting": {"reason": "CreateContainerConfigError"}})
    status = pods.status_of(pod, [state], [], "", "2026-01-01T00:00:00Z")
    written = await served.update(plural, "default", "p", {**pod, "status": status}, options)

    assert written["status"]["containerStatuses"][0]["state"] == state.state
    assert "podIP" not in written["status"]


def test_volume_waits_for_its_claim_and_lasts_as_long(runner):
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "models"}}
    with pytest.raises(pods.MissingReference, match='persistentvolumeclaim "models" not found'):
        runner._volumes._make_volume(volume, runner.pod)
    folders = []
    for uid in ("first", "first", "second"):
        runner._lookup = lambda kind, name, uid=uid: {"kind": kind, "metadata": {"uid": uid}}
        folders.append(runner._volumes._make_volume(volume, runner.pod))

    assert folders[0] == folders[1] != folders[2]


@pytest.mark.parametrize("is_projected", [False, True])
def test_files_of_a_volume_have_the_modes_that_it_asks_for(runner, is_projected):
    content = {"kind": "ConfigMap", "data": {"run.sh": "#!/bin/sh\n", "words": "a"}}
    runner._lookup = lambda kind, name: content if (kind, name) == ("ConfigMap", "c") else None
    items = [{"key": "run.sh", "path": "bin/run", "mode": 0o755}, {"key": "words", "path": "words"}]
    source = {"name": "c", "items": items}
    volume = {"configMap": {**source, "defaultMode": 0o640}}
    if is_projected:
        volume = {"projected": {"sources": [{"configMap": source}], "defaultMode": 0o640}}
    folder = runner._volumes._make_volume({"name": "v", **volume}, runner.pod)

    modes = [(folder / name).stat().st_mode & 0o777 for name in ("bin/run", "words")]
    assert modes == [0o755, 0o640]


def test_fields_of_the_pod_are_files_of_a_volume(runner):
    labels = {"b": "2", "a": 'said "1"'}
    runner.pod["metadata"] |= {"labels": labels}
    limits = {"resources": {"limits": {"memory": "1Mi"}}}
    runner.pod["spec"]["containers"] = [{**MAIN, **limits}]
    memory = {"containerName": "main", "resource": "limits.memory"}
    items = [
        {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "mode": 0o400},
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "b", "fieldRef": {"fieldPath": "metadata.labels['b']"}},
        {"path": "of/memory", "resourceFieldRef": memory},
    ]
    runner.pod["spec"]["volumes"] = [
        {"name": "own", "downwardAPI": {"items": items}},
        {"name": "parts", "projected": {"sources": [{"downwardAPI": {"items": items[:1]}}]}},
    ]
    runner._volumes.make(runner.pod)
    runner._volumes._mounts = [(runner.folder / "volumes/own", "/own")]
    own = runner.folder / "volumes/own"
    names = ("name", "labels", "b", "of/memory", "../parts/name")

    expected = ["p", 'a="said \\"1\\""\nb="2"', "2", "1048576", "p"]
    assert [(own / name).read_text() for name in names] == expected
    assert (own / "name").stat().st_mode & 0o777 == 0o400
    labels["b"] = "3"
    runner.refresh_volumes()
    assert (own / "b").read_text() == "3"


async def test_changed_config_map_is_written_to_the_volumes_of_running_pods(served, runner):
    """So that a program that looks at its file takes a new configuration, as on a real cluster."""
    served.store.put(PODS, make_pod())
    served.store.put(PODS, make_pod("elsewhere", namespace="other"))
    changes, metadata = [], {"namespace": "default", "name": "words"}
    served.store.subscribe(changes.append)
    runner._volumes._mounts = [(runner.folder / "volumes/words", "/words")]
    runner.pod["spec"]["volumes"] = [{"name": "words", "configMap": {"name": "words"}}]
    runner._lookup = lambda kind, name: served.find("v1", kind, "default", name)
    seen = []
    for text in ("hello", "goodbye"):
        item = {"kind": "ConfigMap", "metadata": metadata, "data": {"greeting": text}}
        served.store.put(("", "configmaps"), item)
        runner.refresh_volumes()
        seen += [path.read_text() for path in (runner.folder / "volumes/words").iterdir()]
    served.store.delete(("", "configmaps"), ("default", "words"))
    runner.refresh_volumes()
    keys = [list(make_node(served).keys_of(change)) for change in changes]

    assert seen == ["hello", "goodbye"]
    assert keys == [[("default", "p", "uid-p")]] * 2 + [[]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(NAME) and $(my.name-1)", "x and y"),
        ("$(OTHER) $NAME $( $", "$(OTHER) $NAME $( $"),
        ("$$(NAME) $$$(NAME)", "$(NAME) $x"),
        ("echo $$", "echo $"),
    ],
)
def test_references_to_variables_are_replaced_as_by_a_kubelet(text, expected):
    assert pods.expand(text, {"NAME": "x", "my.name-1": "y"}) == expected


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({"resource": "limits.cpu"}, "3"),
        ({"resource": "limits.cpu", "divisor": "1m"}, "2500"),
        ({"resource": "limits.memory", "divisor": "0"}, str(2**30)),
        ({"resource": "requests.memory", "divisor": "1Mi"}, "512"),
        ({"resource": "requests.cpu"}, "0"),
    ],
)
def test_amounts_of_resources_are_whole_numbers(reference, expected):
    amounts = {"limits": {"cpu": "2500m", "memory": "1Gi"}, "requests": {"memory": "512Mi"}}
    entry = {"name": "A", "valueFrom": {"resourceFieldRef": reference}}
    container = {**MAIN, "resources": amounts, "env": [entry]}

    assert pods.environment(make_pod(), container, "", lambda kind, name: None) == {"A": expected}


def test_amount_is_that_of_the_container_that_is_named():
    other = {"name": "other", "image": "x:1", "resources": {"limits": {"cpu": "3"}}}
    reference = {"resource": "limits.cpu", "containerName": "other"}
    container = {**MAIN, "env": [{"name": "A", "valueFrom": {"resourceFieldRef": reference}}]}
    found = pods.environment(make_pod("p", container, other), container, "", lambda *_: None)

    assert found == {"A": "3"}


def test_variable_takes_any_bytes_of_a_secret():
    secret = {"kind": "Secret", "data": {"KEY": "//79"}}
    reference = {"secretKeyRef": {"name": "s", "key": "KEY"}}
    sources = {
        "envFrom": [{"secretRef": {"name": "s"}}],
        "env": [{"name": "A", "valueFrom": reference}],
    }
    found = pods.environment(make_pod(), {**MAIN, **sources}, "", lambda kind, name: secret)

    assert {name: os.fsencode(value) for name, value in found.items()} == {
        "KEY": b"\xff\xfe\xfd",
        "A": b"\xff\xfe\xfd",
    }


class SlowClient:
    """A connection whose client reads nothing until `is_read`."""

    def __init__(self):
        self.written = b""
        self.is_read = asyncio.Event()

    def write(self, data):
        self.written += data

    async def send(self, data):
        self.write(data)
        await self.is_read.wait()


async def test_output_of_a_pod_waits_for_a_client_that_reads_slowly():
    """Else the client would be cut off, as with `kubectl cp` of a large file."""
    client = SlowClient()
    stream = spdy.SpdyStream(spdy.SpdySession(client, None), 1, {})
    output = asyncio.StreamReader()
    output.feed_data(b"x" * 2**20)
    output.feed_eof()
    copying = asyncio.create_task(stream.copy_from(output))
    for _ in range(100):
        await asyncio.sleep(0)
    num_waiting = len(client.written)
    client.is_read.set()
    async with asyncio.timeout(PATIENT_S):
        await copying

    assert num_waiting <= 2**17
    assert len(client.written) >= 2**20


async def test_connection_to_a_pod_ends_whose_client_has_gone_before_it_was_there():
    ends, output = [], asyncio.StreamReader()
    output.feed_eof()

    async def connect(port):
        return output, types.SimpleNamespace(close=lambda: ends.append(port))

    streams = pod_streams.PodStreams.__new__(pod_streams.PodStreams)
    streams._call = types.SimpleNamespace(exchange=types.SimpleNamespace(is_closed=True))
    streams._runner = types.SimpleNamespace(connect=connect)
    client = SlowClient()
    await streams._forward(spdy.SpdyStream(spdy.SpdySession(client, None), 1, {"port": "80"}), None)

    assert ends == [80]


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "nosuch"), pods.MissingReference("secret")]
)
@pytest.mark.parametrize("query", ["", "tty=true"])
async def test_command_that_cannot_be_started_is_told_to_its_client(query, error):
    """Else kubectl exec would wait for ever."""

    async def refuse(container, command):
        raise error

    streams = pod_streams.PodStreams.__new__(pod_streams.PodStreams)
    streams._call = calls.ApiCall(Answer(query))
    streams._container = MAIN
    streams._runner = types.SimpleNamespace(open_command=refuse, open_terminal=refuse)
    client = SlowClient()
    session = spdy.SpdySession(client, None)
    last, output = (spdy.SpdyStream(session, number, {}) for number in (1, 3))
    streams._streams = {"error": last, "stdout": output}
    await streams._execute(last)

    assert b"\0\0\0\3\1\0\0\0" in client.written  # the end of the output
    assert b'"status": "Failure"' in client.written
    assert str(error).encode() in client.written
