"""The commands that a graph becomes, and the graphs of examples/llm."""

import importlib
import pathlib
import shlex
import sys

import pytest

from dynamo.base import errors
from dynamo.launch.allocation import Allocation
from dynamo.sdk import commands, declaration, graph, yaml_file
from dynamo.sdk.settings import ServiceConfig

LLM = pathlib.Path(__file__).parents[3] / "examples" / "llm"
MACHINE = Allocation(cores=(0, 1, 2, 3), devices=("0", "1"))


@declaration.service(resources={"gpu": 1, "cpu": "1500m"}, workers=2, seed=7)
class Leaf:
    @declaration.endpoint()
    async def generate(self, request):
        yield request


@declaration.service(inside="Root")
class Part:
    """Something that Root does."""


@declaration.service(module="dynamo.frontend", dynamo={"namespace": "n"})
class Root:
    leaf = declaration.depends(Leaf)
    part = declaration.depends(Part)


def make(*specs, machine=MACHINE, config=None, environ=None):
    chosen = specs or graph.services(declaration.spec_of(Root))
    return commands.make(
        chosen,
        ServiceConfig(config or {}),
        machine,
        target="m:Root",
        directory="/a b",
        namespace="n",
        environ=environ or {},
    )


def test_each_worker_gets_a_gpu_and_cores_of_its_own():
    plan = make()
    one, two = plan.commands[1:]

    assert [command.name for command in plan.commands] == ["Root", "Leaf 1", "Leaf 2"]
    assert (one.resources, two.resources) == (
        Allocation((0,), ("0",)),
        Allocation((1,), ("1",)),
    )
    assert plan.notes == ("Part runs inside Root: it has no process of its own",)


def test_machine_without_gpus_or_cores_shares_what_it_has():
    plan = make(machine=Allocation(cores=(0,)))

    assert {command.resources for command in plan.commands} == {Allocation()}
    assert len(plan.notes) == 3


def test_too_few_gpus_are_an_error():
    with pytest.raises(errors.ConfigError, match="free devices"):
        make(machine=Allocation(devices=("0",)))


def test_shell_line_holds_all_that_the_process_gets():
    command = make(environ={"DYN_FILE_KV": "/d"}).commands[1]
    words = shlex.split(command.shell())

    assert words[:3] == ["cd", "/a b", "&&"]
    assert words[-6:] == [*command.argv][-6:]
    assert {"DYN_FILE_KV=/d", "DYN_NAMESPACE=n", "CUDA_VISIBLE_DEVICES=0"} <= {*words}
    assert 'DYNAMO_SERVICE_CONFIG={"Leaf": {"seed": 7}}' in words
    assert words[words.index("taskset") + 2] == "0"


def test_file_changes_workers_resources_environment_and_module():
    args = {
        "workers": 1, "resources": {"gpu": 2}, "environment": {"A": 1}, "module": "dynamo.mocker"
    }  # fmt: skip
    plan = make(
        config={"Leaf": {"ServiceArgs": args}, "Root": {"ServiceArgs": {"module": "dynamo.mocker"}}}
    )

    assert len(plan.commands) == 2
    assert plan.commands[1].resources.devices == ("0", "1")
    assert plan.commands[1].environ["A"] == "1"
    assert plan.commands[0].argv[2] == "dynamo.mocker"


@pytest.mark.parametrize("value", ["many", -1, "nan", 10_001])
def test_wrong_number_names_file_service_and_field(value):
    with pytest.raises(errors.ConfigError, match=r"test_sdk_commands\.py, Leaf, workers"):
        make(config={"Leaf": {"ServiceArgs": {"workers": value}}})


@pytest.mark.parametrize(
    ("name", "flags", "roles"),
    [
        ("agg", "--router-mode round-robin", [False]),
        ("agg_router", "--router-mode kv --kv-overlap-score-weight 1.0", [False, False]),
        ("disagg", "--router-mode round-robin", [False, True]),
        ("disagg_router", "--router-mode kv --kv-overlap-score-weight 1.0", [False, True]),
    ],
)
def test_graph_of_the_example_becomes_our_own_commands(name, flags, roles, monkeypatch):
    plan = plan_of_example(name, monkeypatch)
    door, *workers = (shlex.join(command.argv) for command in plan.commands)

    assert f"-m dynamo.frontend --http-port 8000 {flags}" in door
    assert [line.endswith("--is-prefill-worker") for line in workers] == roles
    assert all("-m dynamo.vllm --model deepseek-ai/" in line for line in workers)
    assert all("--max-model-len 16384 --enforce-eager" in line for line in workers)
    assert ("--disaggregation-mode decode" in workers[0]) == (True in roles)


def plan_of_example(name, monkeypatch, *overrides):
    for module in ("graphs", "components", f"graphs.{name}", "components.services"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(LLM))
    specs = graph.load(f"graphs.{name}:Frontend", LLM)
    values = ServiceConfig(yaml_file.read(LLM / "configs" / f"{name}.yaml"))
    return make(*specs, machine=Allocation(), config=values.with_overrides(overrides))


def test_planner_of_the_example_starts_the_workers_of_the_file(monkeypatch):
    plan = plan_of_example("agg_planner", monkeypatch)
    planner = plan.commands[1].argv
    flags = planner[planner.index("--worker-flags") + 1].split()

    assert [command.service for command in plan.commands] == ["Frontend", "Planner"]
    assert planner[planner.index("--backend") + 1] == "vllm"
    assert flags[:2] == ["--model", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"]
    assert "--enforce-eager" in flags
    assert "--no-operation" not in planner
    assert "VllmWorker starts no process: its workers are 0" in plan.notes


def test_planner_of_the_example_that_only_advises_looks_at_the_workers_of_the_graph(monkeypatch):
    overrides = (
        "--Planner.environment=virtual",
        "--Planner.no-operation=true",
        "--VllmWorker.ServiceArgs.workers=2",
    )
    plan = plan_of_example("agg_planner", monkeypatch, *overrides)
    planner = plan.commands[1].argv

    assert [command.name for command in plan.commands[2:]] == ["VllmWorker 1", "VllmWorker 2"]
    assert planner[planner.index("--environment") + 1] == "virtual"
    assert planner[-1] == "--no-operation"
    assert "--worker-flags" not in planner


def test_planner_of_the_example_on_a_cluster_is_told_its_frontend_by_the_operator(monkeypatch):
    overrides = ("--Planner.environment=kubernetes", "--VllmWorker.ServiceArgs.workers=1")
    planner = plan_of_example("agg_planner", monkeypatch, *overrides).commands[1].argv

    assert planner[planner.index("--environment") + 1] == "kubernetes"
    assert not {"--frontend-url", "--planner-port", "--worker-flags"} & {*planner}


def test_router_of_the_example_that_does_not_exist_is_named(monkeypatch):
    with pytest.raises(
        errors.ConfigError, match="expected one of kv, random, round-robin, got 'x'"
    ):
        plan_of_example("agg", monkeypatch, "--Processor.router=x")


def test_workers_beside_those_of_the_planner_are_refused(monkeypatch):
    with pytest.raises(errors.ConfigError, match=r"VllmWorker\.ServiceArgs\.workers: 0, got 2"):
        plan_of_example("agg_planner", monkeypatch, "--VllmWorker.ServiceArgs.workers=2")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_module:A", "there is no module no_such_module"),
        ("llama3:latest", "llama3:latest is read as a graph, .* a hub name, without a tag"),
        ("graphs.agg:Nobody", "has no class Nobody"),
        ("graphs.agg:links", "has no class links"),
        ("nonsense", "expected a graph, module:Class"),
    ],
)
def test_target_that_cannot_be_loaded_is_named(target, says, monkeypatch):
    monkeypatch.syspath_prepend(str(LLM))
    with pytest.raises(errors.ConfigError, match=says):
        graph.load(target, LLM)


def test_file_is_named_by_any_path_into_the_directory(monkeypatch):
    monkeypatch.syspath_prepend(str(LLM))
    for path in ("graphs/agg.py", f"{LLM}/graphs/agg.py", "../llm/graphs/agg", "./graphs/agg.py"):
        assert graph.load(f"{path}:Frontend", LLM)[0].name == "Frontend"
    with pytest.raises(
        errors.ConfigError, match=r"\.\./agg\.py: expected a file in .*--working-dir"
    ):
        graph.load("../agg.py:Frontend", LLM)


def test_service_that_does_not_exist_is_named():
    with pytest.raises(errors.ConfigError, match="expected one of Root, Leaf, Part"):
        graph.find(graph.services(declaration.spec_of(Root)), "Twig")


def test_wrong_decorators_name_file_and_class():
    with pytest.raises(errors.ConfigError, match=r"test_sdk_commands\.py, class Bad, resources"):
        declaration.service(resources={"gpus": 1})(type("Bad", (), {"__module__": __name__}))
    for workers in (0, "2"):
        with pytest.raises(errors.ConfigError, match="workers: expected a number of at least 1"):
            declaration.service(workers=workers)(type("Bad", (), {"__module__": __name__}))
    for argument, value in (("resources", ["gpu"]), ("resources", "gpu"), ("dynamo", "demo")):
        with pytest.raises(errors.ConfigError, match=f"class Bad, {argument}: expected keys with"):
            declaration.service(**{argument: value})(type("Bad", (), {"__module__": __name__}))
    with pytest.raises(
        errors.ConfigError, match=r"Bad, dynamo: expected namespace, .*, got 'namespce'"
    ):
        declaration.service(dynamo={"namespce": "n"})(type("Bad", (), {"__module__": __name__}))
    with pytest.raises(errors.ConfigError, match="decorator @service"):
        declaration.depends(str)


def test_dependency_outside_the_graph_is_named():
    with pytest.raises(errors.ConfigError, match=r"Root\.leaf: Leaf is not part of this graph"):
        _ = Root().leaf


def test_address_is_namespace_and_name():
    assert Root.dynamo_address() == ("n", "Root")
    assert Leaf.dynamo_address() == ("dynamo", "Leaf")


def test_file_in_a_directory_with_blanks_names_a_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my graph").mkdir()
    (tmp_path / "my graph" / "blanks.py").write_text(
        "from dynamo.sdk import service\n@service\nclass Alone:\n    pass\n"
    )

    assert graph.is_target("my graph/blanks.py:Alone")
    assert [spec.name for spec in graph.load("my graph/blanks.py:Alone", tmp_path)] == ["Alone"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("X = 1 + None\n", r"TypeError: unsupported .*mistake\.py, line 1\)"),
        ("\nX = {}['a']\n", r"KeyError: 'a' .*mistake\.py, line 2\)"),
        (
            "from dynamo.sdk import endpoint\nendpoint(transports=['http'])\n",
            r"TypeError: endpoint\(\) got an unexpected keyword argument 'transports' .*line 2\)",
        ),
    ],
)
def test_mistake_of_a_graphs_module_is_named_with_its_line(tmp_path, monkeypatch, text, says):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mistake.py").write_text(text)
    sys.modules.pop("mistake", None)

    with pytest.raises(errors.ConfigError, match=says):
        graph.load("mistake:Root", tmp_path)


def blocking(self, request):
    yield request


async def with_two(self, request, more):
    yield request


async def named(self, request):
    yield request


async def annotated(self, request: "Forgotten"):  # noqa: F821
    yield request


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (declaration.endpoint()(blocking), "expected async def"),
        (
            declaration.endpoint()(with_two),
            "expected the parameters self and request, got self, re",
        ),
        (
            declaration.endpoint("chat/completions")(named),
            "expected a name of a-z, 0-9, - and _, got 'chat/compl",
        ),
        (
            declaration.endpoint()(annotated),
            "an annotation cannot be read: name 'Forgotten' is not defined",
        ),
        (declaration.api(annotated), "an annotation cannot be read: name 'Forgotten' is not defi"),
    ],
)
def test_method_that_cannot_answer_is_named_before_anything_starts(method, says):
    Bad = declaration.service(type("Bad", (), {"__module__": __name__, "generate": method}))
    with pytest.raises(errors.ConfigError, match=rf"\.py, Bad\.generate: {says}"):
        declaration.spec_of(Bad).check()


def test_file_makes_a_service_of_another_command():
    (command,) = make(
        declaration.spec_of(Leaf),
        config={"Leaf": {"ServiceArgs": {"module": "dynamo.mocker", "workers": 1}}},
    ).commands

    assert command.argv[1:] == ("-m", "dynamo.mocker", "--seed", "7")


def test_arguments_of_dynamos_decorator_without_effect_are_no_configuration():
    @declaration.service(module="dynamo.frontend", image="i:1", app=object(), seed=1)
    class Served:
        """As the examples of version 0.3 declare one, with an application of FastAPI."""

    (command,) = make(declaration.spec_of(Served)).commands

    assert command.argv[-2:] == ("--seed", "1")
    with pytest.raises(
        errors.ConfigError, match=r"class Bad, policy: expected a value that JSON has"
    ):

        @declaration.service(policy=object())
        class Bad:
            """With a value that no process could be given."""


def test_names_of_dynamos_sdk_are_where_graphs_import_them():
    sdk, config, image = map(
        importlib.import_module, ("dynamo.sdk", "dynamo.sdk.lib.config", "dynamo.sdk.lib.image")
    )

    assert config.ServiceConfig is ServiceConfig
    assert image.DYNAMO_IMAGE == sdk.DYNAMO_IMAGE
    assert sdk.async_on_shutdown is sdk.on_shutdown
