"""The commands of `dynamo` that start nothing: packages, deployments, states, reports."""

import asyncio
import io
import json
import os
import pathlib
import pwd
import socket
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from rich import console

from dynamo.base import distribution, errors
from dynamo.cli import bench, deployment, main, models, package, processes, top, waiting
from dynamo.launch import state
from dynamo.worker import hub_models
from waiting import eventually

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
HELLO = {"target": "hello_world:Frontend", "working_dir": str(EXAMPLES / "hello_world")}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    return tmp_path


def build(capsys):
    package.build(package.BuildConfig(**HELLO))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Successfully built ")
    return last.split()[-1].removesuffix(".")


def test_build_prints_a_tag_and_writes_sources_manifest_and_lock(home, capsys):
    tag = build(capsys)
    assert build(capsys) == tag  # the same sources
    with tarfile.open(package.archive_path(tag, None)) as archive:
        names = archive.getnames()
        lock = archive.extractfile("requirements.lock").read().decode()
    package.get(package.GetConfig(tag=tag))
    manifest = json.loads(capsys.readouterr().out)
    package.get(package.GetConfig())

    assert {"manifest.json", "src/hello_world.py", "src/config.yaml"} <= {*names}
    assert "dynamo-serving==" in lock
    assert [each["name"] for each in manifest["services"]] == ["Frontend", "Middle", "Backend"]
    assert tag in capsys.readouterr().out


def test_unknown_tag_and_missing_docker_are_named(home, capsys, monkeypatch):
    tag = build(capsys)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(errors.ConfigError, match="docker or podman"):
        package.containerize(package.ContainerizeConfig(tag=tag))
    with pytest.raises(errors.ConfigError, match="`dynamo get` lists them"):
        package.get(package.GetConfig(tag="a:b"))


def test_archives_beside_the_sources_are_not_packaged(home, tmp_path, capsys):
    source = "from dynamo.sdk import service\n@service\nclass Small:\n    pass\n"
    (tmp_path / "small.py").write_text(source)
    options = package.BuildConfig(
        target="small:Small", working_dir=str(tmp_path), output=str(tmp_path)
    )
    package.build(options)
    package.build(options)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "Success" in line]

    assert first == second


def test_archives_that_belong_to_the_sources_are_packaged(home, tmp_path):
    (tmp_path / "small.py").write_text(
        "from dynamo.sdk import service\n@service\nclass Small: pass\n"
    )
    (tmp_path / "data.tar.gz").write_bytes(b"1")
    (tmp_path / "small-0123456789ab.tar.gz").write_bytes(b"2")  # of an earlier build

    assert [name for name, _ in package.sources(tmp_path, tmp_path)] == ["data.tar.gz", "small.py"]


def test_links_that_are_left_out_of_the_sources_are_named(tmp_path, capsys):
    (tmp_path / ".venv").mkdir()
    for name in ("shared.py", ".venv/python"):
        (tmp_path / name).symlink_to("/bin/true")
    (tmp_path / "m.py").write_text("")

    assert [name for name, _ in package.sources(tmp_path, tmp_path)] == ["m.py"]
    assert capsys.readouterr().err == "dynamo: shared.py is a symbolic link, which is left out\n"


def test_files_with_secret_variables_are_left_out_of_the_sources_and_named(tmp_path, capsys):
    for name in (".env", ".env.local", ".env.example", ".environ", "m.py"):
        (tmp_path / name).write_text("KEY=secret")

    names = [name for name, _ in package.sources(tmp_path, tmp_path)]

    assert names == [".env.example", ".environ", "m.py"]
    text = "may have keys and is left out: set its variables where the graph runs"
    assert capsys.readouterr().err == f"dynamo: .env {text}\ndynamo: .env.local {text}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems refuse such names")
def test_file_whose_name_is_no_text_is_named(home, tmp_path):
    source = "from dynamo.sdk import service\n@service\nclass Named: pass\n"
    (tmp_path / "named.py").write_text(source)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(errors.ConfigError, match=r"caf\\udce9\.txt'\): expected a name in UTF-8"):
        package.build(package.BuildConfig(target="named:Named", working_dir=str(tmp_path)))


def test_archive_that_cannot_be_written_or_read_is_named(home, capsys):
    (home / "file").write_text("in the way")
    with pytest.raises(errors.ConfigError, match=r"file: .*--output names another"):
        package.build(package.BuildConfig(**HELLO, output=str(home / "file")))
    path = package.archive_path(build(capsys), None)
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    (path.parent / "whole-1.tar.gz").write_bytes(whole)

    assert package.get(package.GetConfig()) == 1  # and the others are listed
    printed = capsys.readouterr()
    assert "expected an archive of `dynamo build`: Compressed file ended" in printed.err
    assert "hello_world:Frontend" in printed.out


@pytest.mark.parametrize("num_bytes", [1, 40, -600])  # with -600 the manifest is whole
def test_tag_whose_archive_is_damaged_is_not_deployed(home, capsys, monkeypatch, num_bytes):
    tag = build(capsys)
    path = package.archive_path(tag, None)
    path.write_bytes(path.read_bytes()[:num_bytes])
    monkeypatch.setattr(package.shutil, "which", lambda name: "/bin/true")
    for work in (
        lambda: deployment.deploy(deployment.DeployConfig(pipeline=tag, dry_run=True)),
        lambda: package.containerize(package.ContainerizeConfig(tag=tag)),
    ):
        with pytest.raises(errors.ConfigError, match="expected an archive of `dynamo build`"):
            work()


def test_tag_may_be_copied_with_the_full_stop_behind_it(home, capsys):
    tag = build(capsys)
    [manifest] = deployment.make_objects(deployment.DeployConfig(pipeline=f"{tag}."))
    pod = manifest["spec"]["services"]["Backend"]["extraPodSpec"]

    assert pod["mainContainer"]["image"] == tag


@pytest.mark.parametrize("ask", [bench.run, top.run])
def test_frontend_that_does_not_answer_is_named_with_what_to_do(ask):
    config = {bench.run: bench.BenchConfig, top.run: top.TopConfig}[ask]
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(errors.Unavailable) as failure:
            ask(config(url=url))

    assert str(failure.value) == (
        f"no frontend answers at {url} (Connection refused): start one with `dynamo serve`,"
        " or name its address with --url"
    )


def test_large_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "one.bin").write_bytes(b"123")
    (tmp_path / "m.py").write_text(
        "from dynamo.sdk import service\n@service\nclass Big:\n    pass\n"
    )
    monkeypatch.setattr(package, "_MOST_BYTES", 2)
    with pytest.raises(errors.ConfigError, match="expected sources, not models"):
        package.build(package.BuildConfig(target="m:Big", working_dir=str(tmp_path)))


def test_deployment_of_a_tag_is_written_with_its_services(home, capsys):
    tag = build(capsys)
    options = deployment.DeployConfig(pipeline=tag, name="hello", dry_run=True)
    assert deployment.deploy(options) == 0
    text = capsys.readouterr().out
    written = yaml.safe_load(text)
    services = written["spec"]["services"]
    container = services["Backend"]["extraPodSpec"]["mainContainer"]

    assert "&" not in text  # anchors are hard to read and to change

    assert (written["apiVersion"], written["kind"]) == (deployment.API_VERSION, deployment.KIND)
    assert written["metadata"] == {"name": "hello"}
    assert {name: each["replicas"] for name, each in services.items()} == {
        "Frontend": 1, "Middle": 1, "Backend": 2
    }  # fmt: skip
    types = {name: each.get("componentType") for name, each in services.items()}
    assert types == {"Frontend": "frontend", "Middle": None, "Backend": None}
    assert services["Backend"]["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9090}
    assert services["Backend"]["livenessProbe"]["httpGet"] == {"path": "/live", "port": 9090}
    assert {"name": "DYN_SYSTEM_PORT", "value": "9090"} in services["Backend"]["envs"]
    assert {"name": "DYN_SYSTEM_HOST", "value": "0.0.0.0"} in services["Backend"]["envs"]
    assert "readinessProbe" not in services["Frontend"]  # the operator has it
    assert container["image"] == tag
    # no shell, which would keep SIGTERM from it
    assert container["command"] == ["python3", "-m", "dynamo.sdk"]
    assert container["args"] == ["hello_world:Frontend", "--service-name", "Backend"]


def test_deployment_of_a_language_model_asks_for_gpus(home, capsys, monkeypatch):
    folder = EXAMPLES / "llm"
    options = deployment.DeployConfig(
        pipeline="graphs.disagg:Frontend",
        working_dir=str(folder),
        file=str(folder / "configs" / "disagg.yaml"),
        image="i:1",
        namespace="there",
    )
    [manifest] = deployment.make_objects(options)
    services = manifest["spec"]["services"]

    assert manifest["metadata"]["namespace"] == "there"
    assert services["Frontend"]["componentType"] == "frontend"
    assert services["PrefillWorker"]["resources"] == {"limits": {"gpu": "1"}}
    assert services["VllmWorker"]["componentType"] == "worker"


def test_deployment_requests_the_cores_and_memory_of_its_services(home):
    options = deployment.DeployConfig(
        pipeline="multi_model:Frontend",
        working_dir=str(EXAMPLES / "multi_model"),
        image="i:1",
        overrides=('--SmallModel.ServiceArgs.resources={"cpu": "500m", "memory": "2Gi"}',),
    )
    [manifest] = deployment.make_objects(options)
    resources = {
        name: service.get("resources") for name, service in manifest["spec"]["services"].items()
    }

    assert resources == {
        "Frontend": None,
        "SmallModel": {"requests": {"cpu": "500m", "memory": "2Gi"}},
        "LargeModel": {"requests": {"cpu": "1"}},
    }


def test_service_of_no_workers_stays_in_the_deployment_with_no_replicas(home):
    def services(*overrides):
        options = deployment.DeployConfig(
            pipeline="hello_world:Frontend",
            working_dir=HELLO["working_dir"],
            image="i:1",
            overrides=overrides,
        )
        [manifest] = deployment.make_objects(options)
        return manifest["spec"]["services"]

    stopped, running = services("--Backend.ServiceArgs.workers=0"), services()

    assert stopped["Backend"]["replicas"] == 0
    assert stopped.keys() == running.keys()
    assert stopped["Backend"]["extraPodSpec"] == running["Backend"]["extraPodSpec"]


class Cluster:
    """The calls of a cluster's connection that `deployment` uses, over a dictionary."""

    namespace = "default"

    def __init__(self):
        self.objects = {}

    async def apply(self, found, manager, *, force):
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "state": "successful"}
        metadata = {**found["metadata"], "uid": "u"}
        self.objects[metadata["name"]] = {**found, "metadata": metadata, "status": ready}
        return self.objects[metadata["name"]]

    async def watch(self, api_version, kind, namespace):
        for each in list(self.objects.values()):
            yield "ADDED", each
        yield "SYNCED", {}

    async def list(self, api_version, kind, namespace, *, labels=""):
        found = [each for each in self.objects.values() if each["kind"] == kind]
        name, _, value = labels.partition("=")
        return [e for e in found if not labels or e["metadata"]["labels"][name] == value]

    async def get(self, api_version, kind, name, namespace):
        return self.objects.get(name)

    async def delete(self, api_version, kind, name, namespace):
        return self.objects.pop(name, None) is not None


async def test_deployments_are_applied_listed_shown_and_deleted(home, capsys):
    cluster = Cluster()
    options = deployment.DeployConfig(
        pipeline="hello_world:Frontend", image="i:1", working_dir=HELLO["working_dir"]
    )
    await deployment._apply(cluster, deployment.make_objects(options), options)
    await deployment._list(cluster, None)
    await deployment._show(cluster, "frontend", None)
    await deployment._delete(cluster, "frontend", None)
    printed = capsys.readouterr().out

    assert "frontend is ready" in printed
    assert "successful" in printed
    assert "kind: DynamoGraphDeployment" in printed
    with pytest.raises(errors.ConfigError, match="no deployment is called frontend"):
        await deployment._delete(cluster, "frontend", None)
    with pytest.raises(errors.ConfigError, match="no deployment is called frontend"):
        await deployment._show(cluster, "frontend", None)


async def test_deployment_that_is_not_ready_is_said_with_its_cause(home, monkeypatch):
    told = []
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.01)
    monkeypatch.setattr(waiting, "say", told.append)

    class SlowCluster(Cluster):
        async def watch(self, api_version, kind, namespace):
            (stored,) = self.objects.values()
            cause = {"type": "Ready", "status": "False", "message": "Backend has 0 of 1 pods"}
            yield "MODIFIED", {**stored, "status": {"conditions": [cause]}}
            while not told or "pods" not in told[-1]:
                await asyncio.sleep(0.01)
            yield "MODIFIED", stored

    options = deployment.DeployConfig(
        pipeline="hello_world:Frontend", image="i:1", working_dir=HELLO["working_dir"]
    )
    await deployment._apply(SlowCluster(), deployment.make_objects(options), options)

    assert told[-1] == "frontend is not ready: Backend has 0 of 1 pods (0 s)"


@pytest.mark.parametrize("is_listed", [True, False])
async def test_deployment_that_somebody_deletes_is_not_waited_for(home, is_listed):
    class EmptiedCluster(Cluster):
        async def watch(self, api_version, kind, namespace):
            (stored,) = self.objects.values()
            other = {"metadata": {"name": "other"}}
            waiting = {**stored, "status": {}}
            yield "ADDED", other
            if is_listed:
                yield "ADDED", waiting
            yield "SYNCED", {}
            yield "DELETED", other
            yield "DELETED", {**waiting, "status": stored["status"]}
            raise AssertionError("it waits on")

    options = deployment.DeployConfig(
        pipeline="hello_world:Frontend", image="i:1", working_dir=HELLO["working_dir"]
    )
    with pytest.raises(errors.Conflict, match="frontend was deleted before it was ready"):
        await deployment._apply(EmptiedCluster(), deployment.make_objects(options), options)


async def test_sources_go_along_and_former_ones_are_deleted(home, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "raw").write_bytes(b"\xff")
    module = tmp_path / "web.py"
    module.write_text(
        "from dynamo.sdk import api, service\n@service\nclass Web:\n    @api\n    async def f(self): pass\n"
    )
    cluster = Cluster()
    options = deployment.DeployConfig(
        pipeline="web:Web", working_dir=str(tmp_path), with_sources=True, namespace="there"
    )
    await deployment._apply(cluster, deployment.make_objects(options), options)
    former = set(cluster.objects)
    module.write_text(module.read_text() + "# changed\n")
    made = deployment.make_objects(options)
    await deployment._apply(cluster, made, options)
    stored = {each["kind"]: each for each in cluster.objects.values()}
    sources, web = stored["ConfigMap"], stored["DynamoGraphDeployment"]["spec"]["services"]["Web"]
    container, volume = web["extraPodSpec"]["mainContainer"], web["extraPodSpec"]["volumes"][0]

    assert len(cluster.objects) == 2
    assert sources["metadata"]["name"] not in former
    assert (sources["data"], sources["binaryData"]) == ({"1": module.read_text()}, {"0": "/w=="})
    assert [owner["uid"] for owner in sources["metadata"]["ownerReferences"]] == ["u"]
    assert volume["configMap"] == {
        "name": sources["metadata"]["name"],
        "items": [{"key": "0", "path": "inner/raw"}, {"key": "1", "path": "web.py"}],
    }
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/graph/src"}]
    assert container["image"] == f"dynamo-serving/frontend:{distribution.version()}"
    assert web["componentType"] == "frontend"
    assert '"host": "0.0.0.0", "port": 8000' in web["envs"][0]["value"]


def test_sources_that_no_config_map_can_hold_are_refused(home, tmp_path):
    (tmp_path / "m.py").write_text("from dynamo.sdk import service\n@service\nclass Big: pass\n")
    (tmp_path / "weights").write_bytes(b"1" * 900_000)
    options = deployment.DeployConfig(
        pipeline="m:Big", working_dir=str(tmp_path), with_sources=True
    )
    with pytest.raises(errors.ConfigError, match=r"at most 900,000 bytes.*got 900,056 in 2 files"):
        deployment.make_objects(options)


@pytest.mark.parametrize("name", ["Bad_Name", "1st", "a-", "a" * 64])
def test_name_that_kubernetes_refuses_is_refused_before(home, name):
    options = deployment.DeployConfig(
        pipeline="hello_world:Frontend", image="i:1", working_dir=HELLO["working_dir"], name=name
    )
    with pytest.raises(errors.ConfigError, match="-n: expected at most 63 lower-case letters"):
        deployment.make_objects(options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: deployment.cloud(deployment.CloudConfig()), "dynamo-platform"),
        (
            lambda: deployment.manage(deployment.DeploymentConfig(action="create")),
            "expected a tag",
        ),
        (lambda: deployment.deploy(deployment.DeployConfig(pipeline="a:1")), "no such archive"),
        (
            lambda: deployment.deploy(deployment.DeployConfig(pipeline="a:e1b2c3d4e5f6")),
            "no such archive",
        ),
        (
            lambda: deployment.deploy(deployment.DeployConfig(pipeline="m:Class", dry_run=True)),
            "expected --image with an image that has its sources",
        ),
        (lambda: deployment.manage(deployment.DeploymentConfig(action="get")), "expected a name"),
        (
            lambda: deployment.manage(
                deployment.DeploymentConfig(action="delete", pipeline="a", dry_run=True)
            ),
            "--dry-run: expected create or update, got delete",
        ),
        (
            lambda: deployment.manage(
                deployment.DeploymentConfig(
                    action="delete", pipeline="a", overrides=("--nmaespace=b",)
                )
            ),
            "unrecognized argument of delete: --nmaespace=b",
        ),
        (
            lambda: deployment.manage(
                deployment.DeploymentConfig(action="get", pipeline="a", image="i:1")
            ),
            "--image: expected create or update, got get",
        ),
        (
            lambda: deployment.manage(deployment.DeploymentConfig(action="list", name="there")),
            "list: expected no name of a deployment, got there; --namespace names the namespace",
        ),
        (
            lambda: deployment.manage(
                deployment.DeploymentConfig(action="delete", pipeline="a", name="b")
            ),
            "delete: expected one name of a deployment, got a and b",
        ),
        (lambda: processes.show_logs(processes.LogsConfig(name="x" * 300)), r"no log of x+ \(File"),
        (lambda: processes.stop(processes.StopConfig()), "no `dynamo serve` runs here"),
        (lambda: processes.show_logs(processes.LogsConfig(name="x")), "no log of x"),
        (lambda: models.remove(models.RemoveConfig(model="no/such")), "`dynamo list`"),
        (lambda: models.remove(models.RemoveConfig(model="storyteller")), "is built in"),
        (lambda: models.pull(models.PullConfig(model="x.gguf")), r"no such file: x\.gguf"),
        (lambda: top.read("http://a.invalid"), r"a\.invalid \(Name or service not known\)"),
        (lambda: bench.run(bench.BenchConfig(url="ftp://x")), "expected http://"),
        (
            lambda: bench.run(bench.BenchConfig(url="x:99999")),
            "expected http://host:port, got 'x:99",
        ),
        (
            lambda: bench.run(bench.BenchConfig(url="http://a..b")),
            r"no frontend answers at http://a",
        ),
        (lambda: top.run(top.TopConfig(url="")), "expected http://host:port, got ''"),
        (lambda: package.get(package.GetConfig(tag="x")), "like app:1a2b, got 'x'"),
    ],
)
def test_mistake_says_what_to_do(home, call, says):
    with pytest.raises(errors.DynamoError, match=says):
        call()


def test_states_of_dead_processes_are_removed(home):
    with state.registered("a", "m") as first, state.registered("a", "m") as second:
        first.update(pid=2**22 + 1)
        second.add_process(state.ProcessState(name="frontend", pid=1, shell="x"))
        second.add_process(state.ProcessState(name="frontend", pid=2, shell="x"))
        with state.registered("a", "m") as third:
            assert third.state.name == "a"  # which is free again
            assert [each.name for each in state.running()] == ["a-2", "a"]
        assert [process.pid for process in state.find(None).processes] == [2]
        assert state.find(None).name == "a-2"
        with pytest.raises(errors.ConfigError, match="there are a-2"):
            state.find("c")
    assert [path.name for path in (home / "state").iterdir()] == []


def test_file_that_is_no_state_is_named(home, capsys):
    (state.directory() / "old.json").write_text("{}")
    processes.list_processes(processes.ProcessListConfig())

    assert "old.json: expected a state of this version's" in capsys.readouterr().err


def test_home_that_is_a_file_is_named(home, monkeypatch):
    (home / "file").write_text("in the way")
    monkeypatch.setenv("DYNAMO_HOME", str(home / "file"))
    with pytest.raises(errors.ConfigError, match="name one by DYNAMO_HOME"):
        processes.list_processes(processes.ProcessListConfig())


def test_user_without_a_home_is_told_to_name_a_directory(monkeypatch):
    monkeypatch.delenv("DYNAMO_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["none"])
    for look in (
        lambda: package.get(package.GetConfig()),
        lambda: processes.list_processes(processes.ProcessListConfig()),
    ):
        with pytest.raises(errors.ConfigError, match=r"home directory.*DYNAMO_HOME"):
            look()


def test_serve_of_another_user_is_named(home, monkeypatch):
    def refuse(pid, number):
        if number:
            raise PermissionError(1, "Operation not permitted")

    with state.registered("a", "m"):
        monkeypatch.setattr(processes.os, "kill", refuse)
        with pytest.raises(errors.ConfigError, match=r"a, process \d+, belongs to another user"):
            processes.stop(processes.StopConfig())


def test_what_cannot_be_listed_is_served_all_the_same(home, capsys):
    (home / "state").write_text("in the way")
    with state.registered("a", "m") as registration, state.logged("a"):
        registration.update(url="http://127.0.0.1:1")

    assert "`dynamo ps` will not list this" in capsys.readouterr().err


def test_logs_of_those_that_have_ended_are_named(home):
    for name in ("y", "x"):
        with state.logged(name):
            print("ready", file=main.sys.stderr)

    with pytest.raises(errors.ConfigError, match=r"runs here; .* whose log is kept: x, y"):
        processes.show_logs(processes.LogsConfig())
    with pytest.raises(errors.ConfigError, match=r"no log of z .*: expected one of x, y"):
        processes.show_logs(processes.LogsConfig(name="z"))


def test_log_is_bounded(home, monkeypatch, capsys):
    monkeypatch.setattr(state, "LOG_BYTES", 10)
    with state.logged("x"):
        for number in range(5):
            print(f"line {number}", file=main.sys.stderr)
    processes.show_logs(processes.LogsConfig(name="x", tail=1))

    assert sum(len(path.read_text()) for path in (home / "state").iterdir()) < 40
    assert "line 4" in capsys.readouterr().err


def test_log_is_followed_where_it_begins_anew(home, monkeypatch):
    monkeypatch.setattr(state, "LOG_BYTES", 20)
    monkeypatch.setattr(processes, "_POLL_S", 0.01)
    shown = io.StringIO()  # capsys loses what another thread writes while it is read
    monkeypatch.setattr(processes.sys, "stdout", shown)

    with ThreadPoolExecutor() as pool, state.registered("x", "m"), state.logged("x"):
        options = processes.LogsConfig(name="x", follow=True)
        following = pool.submit(processes.show_logs, options)
        for line in ("begins\n", "fills the first part\n", "begins anew\n"):
            main.sys.stderr.write(line)
            eventually(lambda line=line: line in shown.getvalue(), what=line)
        state._path("x").unlink()

        assert following.result() == 0


def test_last_words_of_a_log_that_is_followed_are_shown(home, monkeypatch, capsys):
    log = state.log_path("x")
    log.write_text("begins\n")

    def end():
        with log.open("a") as file:
            file.write("stopped\n")
        return []

    monkeypatch.setattr(state, "running", end)
    processes.show_logs(processes.LogsConfig(name="x", follow=True))

    assert capsys.readouterr().out == "begins\nstopped\n"


def test_models_of_the_cache_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(hub_models, "cached_models", lambda: {"Qwen/Qwen3-0.6B": 1_500_000_000})
    models.list_models(models.ModelListConfig())
    printed = capsys.readouterr().out

    assert "storyteller" in printed
    assert "1.50 GB" in printed


def test_report_of_a_load_counts_failures_and_percentiles():
    answers = [
        bench.Answered(0.0, (0.1, 0.2), 5),
        bench.Answered(0.0, (0.3,), 1),
        bench.Answered(0, error="no"),
    ]
    report = bench.summarize(answers, 2.0)

    assert (report["requests"], report["failed"], report["requests_per_s"]) == (3, 1, 1.0)
    assert (report["ttft_ms_mean"], report["itl_ms_mean"]) == (200.0, 100.0)
    assert (report["tokens_per_s"], report["chunks_per_s"]) == (3.0, 1.5)
    assert "first error: no" in bench.render(report)
    assert bench.summarize([], 1.0)["ttft_ms_p50"] == 0.0


def test_load_of_which_all_requests_fail_is_one_sentence_with_the_cause(monkeypatch, capsys):
    async def refuse(options, clock, answers):
        answers += [bench.Answered(0.0, error="401: expected an API key")] * 3

    monkeypatch.setattr(bench, "_run", refuse)
    with pytest.raises(errors.Unavailable) as failure:
        bench.run(bench.BenchConfig())

    assert str(failure.value) == "all 3 requests failed: 401: expected an API key"
    assert capsys.readouterr().out == ""
    assert bench.run(bench.BenchConfig(json=True)) == 1
    assert '"failed":3' in capsys.readouterr().out


def test_load_that_meets_no_frontend_says_what_to_do(monkeypatch):
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(errors.Unavailable, match="start one with `dynamo serve`"):
            bench.run(bench.BenchConfig(url=url, model="m", requests=2))


def test_load_by_rate_ends_with_its_last_request(monkeypatch):
    async def answer(self, model, prompt, max_tokens):
        return bench.Answered(0.0, (0.1,), 1)

    class Pauses:
        def __init__(self):
            self.made = []

        async def sleep(self, seconds):
            self.made.append(seconds)

    pauses = Pauses()
    monkeypatch.setattr(bench._ChatClient, "stream", answer)
    answers = []
    asyncio.run(bench._run(bench.BenchConfig(model="m", requests=3, rate=2.0), pauses, answers))

    assert (len(answers), len(pauses.made)) == (3, 2)


def test_interrupted_load_reports_what_has_been_answered(monkeypatch, capsys):
    async def be_interrupted(options, clock, answers):
        answers.append(bench.Answered(0.0, (0.1,), 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_run", be_interrupted)

    assert bench.run(bench.BenchConfig()) == 130
    assert "1 requests, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['a{model="m"} ', 'a{model="m"} x'])
def test_top_names_an_address_where_no_frontend_answers(monkeypatch, text):
    monkeypatch.setattr(top.client.HttpClient, "read", lambda self, path: text)
    with pytest.raises(errors.Unavailable, match=r"no frontend answers at http://h \(could not"):
        top.read("http://h")


def test_top_lists_requests_of_no_model_only_while_there_are_some():
    total = 'dynamo_frontend_requests_total{{model="{}"}} {}\n'
    before = top.parse(total.format("m", 1) + total.format("unknown", 5))
    now = top.parse(total.format("m", 1) + total.format("unknown", 6))

    assert [row[0] for row in top.compare(before, before, 1.0)] == ["m"]
    assert [row[0] for row in top.compare(before, now, 1.0)] == ["m", "unknown"]


def test_top_compares_two_readings():
    text = """# HELP x
dynamo_frontend_requests_total{endpoint="a",model="m",status="success"} 4
dynamo_frontend_requests_total{endpoint="b",model="m",status="success"} 2
dynamo_frontend_output_tokens_total{model="m"} 50
dynamo_frontend_time_to_first_token_seconds_sum{model="m"} 0.5
dynamo_frontend_time_to_first_token_seconds_count{model="m"} 5
dynamo_frontend_inflight_requests{model="m"} 3
dynamo_frontend_model_workers{model="m"} 2
dynamo_frontend_input_sequence_tokens_sum{model="m"} 400
dynamo_frontend_cached_tokens_sum{model="m"} 100
"""
    rows = top.compare({}, top.parse(text), 2.0)

    assert rows == [("m", "2", "3", "3.0", "25.0", "100.0", "–", "25%", "0")]


def test_top_counts_workers_once_that_several_frontend_processes_have():
    metric = 'dynamo_frontend_{}{{http_worker="{}",model="m"}} 2\n'
    names = [(name, n) for name in ("model_workers", "inflight_requests") for n in (0, 1)]
    (row,) = top.compare({}, top.parse("".join(metric.format(*name) for name in names)), 1.0)

    assert row[:3] == ("m", "2", "4")


def test_table_of_top_in_a_pipe_ends_its_last_line(monkeypatch, capfd):
    monkeypatch.setattr(top, "read", lambda url: {("dynamo_frontend_model_workers", "m"): 2.0})
    top.run(top.TopConfig(once=True, interval=0.1))

    assert capfd.readouterr().out.endswith("0 \n")


def test_top_shows_all_heads_whole_in_eighty_columns():
    name = "organisation/model-of-some-size-and-kind"
    row = (name, "12", "1024", "1234.5", "123456.7", "12345.6", "1234.5", "100%", "1024")
    terminal = console.Console(width=80, record=True)
    terminal.print(top._table("http://127.0.0.1:8000", [row]))
    text = terminal.export_text()

    assert all(head in text for head in top._COLUMNS)
    assert all(figure in text for figure in row[1:])


def test_top_shows_names_with_brackets_as_they_are():
    name = "a[/b][red]"
    terminal = console.Console(width=80, record=True)
    terminal.print(top._table("http://[::1]:8000", [(name, *"12345678")]))
    text = terminal.export_text()

    assert "http://[::1]:8000" in text
    assert name in text


@pytest.mark.parametrize("flags", [["-h"], ["--help"], []])
def test_help_has_the_boxes_of_the_article(flags, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    main._run(flags)
    lines = capsys.readouterr().out.splitlines()
    commands = [line.split()[1] for line in lines if line.startswith("│ ") and line[2] != " "]

    assert " Usage: dynamo [OPTIONS] COMMAND [ARGS]..." in lines
    assert commands[:4] == ["--version", "--install-completion", "--show-completion", "--help"]
    assert commands[4:13] == [
        "env", "serve", "run", "deploy", "build", "get", "deployment", "containerize", "cloud"
    ]  # fmt: skip
    assert {len(line) for line in lines if line.startswith(("│", "╭", "╰"))} == {100}


def test_deployment_is_ready_when_its_present_form_is():
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "observedGeneration": 2}

    assert deployment.is_ready({"metadata": {"generation": 2}, "status": ready})
    assert not deployment.is_ready({"metadata": {"generation": 3}, "status": ready})
    assert not deployment.is_ready({"metadata": {"generation": 1}})


def test_top_counts_from_zero_after_the_frontend_was_restarted():
    names = [f"dynamo_frontend_{name}_total" for name in ("requests", "output_tokens")]
    before, after = ({(name, "m"): value for name in names} for value in (500.0, 20.0))

    ((_, _, _, requests_per_s, tokens_per_s, *_),) = top.compare(before, after, 10.0)

    assert (requests_per_s, tokens_per_s) == ("2.0", "2.0")
