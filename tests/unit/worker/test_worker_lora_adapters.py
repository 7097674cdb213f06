"""The order of steps in which LoRA adapters are loaded and unloaded, what is undone, and the routes of the commands."""

import asyncio
from pathlib import Path

import pytest
import worker_fakes

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import model_errors
from dynamo.worker import lora_adapters


class World:
    """An engine with adapters, and a model card with their names."""

    def __init__(self):
        self.names, self.calls = ["native"], []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.failure, self.refusal, self.is_ready = None, None, True

    def is_serving(self):
        return self.is_ready

    @property
    def lora_names(self):
        return tuple(self.names)

    async def load_lora(self, name, directory):
        await self.may_load.wait()
        if self.failure is not None:
            raise self.failure
        self.names.append(name)
        self.calls.append(f"load {name}")

    async def unload_lora(self, name):
        if self.failure is not None:
            raise self.failure
        self.names.remove(name)
        self.calls.append(f"unload {name}")

    async def publish(self, names):
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(names)


@pytest.fixture
def world():
    return World()


@pytest.fixture
async def adapters(world):
    adapters = lora_adapters.LoraAdapters(
        world, world.publish, world.is_serving, clocks.SystemClock(), load_s=60
    )
    adapters.begin("m")
    yield adapters
    await adapters.close()


@pytest.fixture
def poet(tmp_path):
    return make(tmp_path / "poet")


def make(directory):
    directory.mkdir()
    (directory / lora_adapters.CONFIG_FILE).write_text("{}")
    return directory


async def test_adapter_is_loaded_before_it_is_published_and_unloaded_after_it_is_withdrawn(
    world, adapters, poet
):
    loaded = await adapters.load("poet", poet)
    there = dict(adapters.number_by_name)
    unloaded = await adapters.unload("poet")

    assert world.calls == ["load poet", ("native", "poet"), ("native",), "unload poet"]
    assert there == {"native": 1, "poet": 2}
    assert (loaded, unloaded) == (2, 2)
    assert adapters.number_by_name == {"native": 1}


async def test_loading_the_same_adapter_again_changes_nothing(world, adapters, poet):
    numbers = [await adapters.load("poet", poet) for _ in range(2)]

    assert numbers == [2, 2]
    assert world.calls == ["load poet", ("native", "poet")]


async def test_number_of_an_adapter_is_not_used_twice(adapters, poet):
    await adapters.load("poet", poet)
    await adapters.unload("poet")

    assert await adapters.load("poet", poet) == 3


async def test_adapter_of_the_command_line_can_be_unloaded(world, adapters):
    await adapters.unload("native")

    assert world.calls == [(), "unload native"]


async def test_two_changes_at_once_run_one_after_the_other(world, adapters, poet, tmp_path):
    world.may_load.clear()
    tasks = [
        asyncio.create_task(adapters.load(name, where))
        for name, where in (("poet", poet), ("clerk", make(tmp_path / "clerk")))
    ]
    await asyncio.sleep(0)
    world.may_load.set()

    assert await asyncio.gather(*tasks) == [2, 3]
    assert world.calls == [
        "load poet",
        ("native", "poet"),
        "load clerk",
        ("native", "poet", "clerk"),
    ]


async def test_taken_name_is_refused_with_the_reason(world, adapters, poet, tmp_path):
    await adapters.load("poet", poet)
    for name, says in (
        ("m", "is the model itself"),
        ("native", "is there, from the start: unload it first"),
        ("poet", f"is there, from {poet}: unload it first"),
    ):
        with pytest.raises(errors.Conflict, match=says):
            await adapters.load(name, tmp_path)

    assert world.names == ["native", "poet"]


async def test_directory_without_an_adapter_is_refused_before_the_engine_sees_it(
    world, adapters, tmp_path
):
    for where in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 999), tmp_path / "\0"):
        with pytest.raises(errors.InvalidRequest, match=r"with adapter_config\.json, got"):
            await adapters.load("poet", where)

    assert world.calls == []


async def test_number_of_adapters_is_bounded(adapters, world, poet):
    world.names += [f"poet-{i}" for i in range(lora_adapters.MAX_ADAPTERS - 1)]
    adapters.begin("m")

    with pytest.raises(errors.Conflict, match="there are 512 LoRA adapters here"):
        await adapters.load("poet", poet)


async def test_adapter_that_cannot_be_published_is_unloaded_again(world, adapters, poet):
    world.refusal = errors.Conflict("not in discovery now")

    with pytest.raises(errors.Conflict, match="not in discovery"):
        await adapters.load("poet", poet)
    assert world.calls == ["load poet", "unload poet"]
    assert adapters.number_by_name == {"native": 1}


async def test_adapter_that_the_engine_refuses_is_not_published(world, adapters, poet):
    world.failure = errors.InvalidRequest("rank 64 is too high")

    with pytest.raises(errors.InvalidRequest, match="rank 64"):
        await adapters.load("poet", poet)
    assert world.calls == []
    assert adapters.number_by_name == {"native": 1}


async def test_unload_that_failed_in_the_engine_can_be_repeated(world, adapters, poet, tmp_path):
    await adapters.load("poet", poet)
    world.failure = errors.EngineFailed("no answer")
    with pytest.raises(errors.EngineFailed, match="no answer"):
        await adapters.unload("poet")
    world.failure, world.calls = None, []

    with pytest.raises(errors.Conflict, match="from an unload that failed: unload it first"):
        await adapters.load("poet", poet)
    await adapters.load("clerk", make(tmp_path / "clerk"))
    unloaded = await adapters.unload("poet")

    assert unloaded == 2
    assert world.names == ["native", "clerk"]
    # the name is not published again meanwhile
    assert world.calls == ["load clerk", *2 * [("native", "clerk")], "unload poet"]


async def test_engine_that_exceeds_the_time_limit_fails(world, poet):
    adapters = lora_adapters.LoraAdapters(
        world, world.publish, world.is_serving, clocks.SystemClock(), load_s=0.01
    )
    adapters.begin("m")
    world.may_load.clear()

    with pytest.raises(errors.EngineFailed, match=r"'poet': not loaded within 0\.01 s"):
        await adapters.load("poet", poet)
    assert adapters.number_by_name == {"native": 1}


async def test_change_of_adapters_continues_when_its_caller_is_cancelled(world, adapters, poet):
    world.may_load.clear()
    caller = asyncio.create_task(adapters.load("poet", poet))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    world.may_load.set()

    assert await adapters.load("poet", poet) == 2  # behind it, and it is there
    assert world.calls == ["load poet", ("native", "poet")]


async def test_change_during_the_stop_of_a_worker_is_a_conflict(world, adapters, poet):
    world.may_load.clear()
    waiting = asyncio.create_task(adapters.load("poet", poet))
    await asyncio.sleep(0)
    await adapters.close()

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await waiting


async def test_unknown_adapter_cannot_be_unloaded(adapters):
    with pytest.raises(model_errors.ModelNotFound, match="no LoRA adapter 'poet' here, but native"):
        await adapters.unload("poet")


async def test_command_is_refused_while_the_worker_does_not_serve(world, adapters, poet):
    await adapters.load("poet", poet)
    world.is_ready, heard = False, list(world.calls)

    for change in (
        adapters.load("clerk", poet),
        adapters.load("poet", poet),
        adapters.unload("poet"),
    ):
        with pytest.raises(errors.Conflict, match="does not serve now: try again"):
            await change
    assert world.calls == heard


async def test_settle_waits_for_the_load_under_way(world, adapters, poet, tmp_path):
    world.may_load.clear()
    loading = asyncio.create_task(adapters.load("poet", poet))
    later = asyncio.create_task(adapters.load("clerk", make(tmp_path / "clerk")))
    for _ in range(3):
        await asyncio.sleep(0)
    world.is_ready = False
    settling = asyncio.create_task(adapters.settle())
    await asyncio.sleep(0)
    is_settled = settling.done()
    world.may_load.set()
    await settling

    assert not is_settled
    assert await loading == 2
    with pytest.raises(errors.Conflict, match="does not serve now"):
        await later
    assert world.calls == ["load poet", ("native", "poet")]


async def test_adapter_is_unloaded_again_whatever_error_publishing_raises(world, adapters, poet):
    world.refusal = OSError("no space left")
    with pytest.raises(OSError, match="no space"):
        await adapters.load("poet", poet)
    world.refusal = None

    assert world.names == ["native"]
    assert await adapters.load("poet", poet) == 2


class FakeAdapters(worker_fakes.Commands, lora_adapters.LoraAdapters):
    result, number_by_name = 3, {"poet": 3}

    async def load(self, name, directory):
        return self.record("load", name, directory)

    async def unload(self, name):
        return self.record("unload", name)


@pytest.fixture
def commanded():
    return FakeAdapters()


@pytest.fixture
async def client(commanded):
    async with worker_fakes.client_of(commanded.routes()) as client:
        yield client


def body(name="poet", uri="file:///adapters/poet"):
    return {"lora_name": name, "source": {"uri": uri}}


@pytest.mark.parametrize("path", ["/v1/loras", "/loras"])
async def test_adapter_is_loaded_listed_and_unloaded(client, commanded, path):
    loaded = await client.post(path, json=body())
    shown = await client.get(path)
    unloaded = await client.delete(f"{path}/poet")

    said = {"status": "success", "lora_name": "poet", "lora_id": 3}
    assert loaded.json() == said | {"message": "LoRA adapter 'poet' is loaded"}
    assert shown.json() == {"status": "success", "loras": {"poet": 3}, "count": 1}
    assert unloaded.json() == said | {"message": "LoRA adapter 'poet' is unloaded"}
    assert commanded.calls == [("load", "poet", Path("/adapters/poet")), ("unload", "poet")]


@pytest.mark.parametrize("path", ["/v1/loras", "/loras"])
async def test_adapter_name_may_contain_slashes_and_spaces(client, commanded, path):
    await client.delete(f"{path}/house/a%20poet/loras/2")

    assert commanded.calls == [("unload", "house/a poet/loras/2")]


@pytest.mark.parametrize(
    ("uri", "directory"),
    [
        ("file:///adapters/a%20poet", "/adapters/a poet"),
        ("file://localhost/adapters/poet", "/adapters/poet"),
        ("/adapters/poet", "/adapters/poet"),
        ("/adapters/50%25", "/adapters/50%25"),
    ],
)
def test_uri_names_a_directory(uri, directory):
    assert lora_adapters.parse_directory(uri) == Path(directory)


@pytest.mark.parametrize(
    "uri",
    [
        "hf://someone/poet",
        "s3://b/poet",
        "file://elsewhere/poet",
        "adapters/poet",
        "file:poet",
        "file://[bad/x",
        "//[x",
        "//host/poet",
        "file:///a?b",
        "file:///a#b",
        "file://loc\u2100alhost/a",
        "",
    ],
)
def test_uri_of_another_place_is_refused(uri):
    with pytest.raises(errors.InvalidRequest, match="expected file:///directory on this worker"):
        lora_adapters.parse_directory(uri)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected"),
        (b'{"lora_name": "", "source": {"uri": "/a"}}', "lora_name: expected"),
        (b'{"lora_name": "poet"}', "source: required, but missing"),
        (b'{"lora_name": "poet", "source": {}}', "source.uri: required, but missing"),
        (b'{"lora_name": "poet", "source": {"uri": "/a"}, "rank": 4}', "`rank`"),
        (b'{"lora_name": "poet", "source": {"uri": "hf://a/b"}}', "source.uri: expected file:///"),
    ],
)
async def test_wrong_field_of_an_adapter_command_is_named(client, commanded, content, says):
    answer = await client.post("/v1/loras", content=content)

    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert commanded.calls == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (model_errors.ModelNotFound("there is no adapter 'poet' here"), 404),
        (errors.Conflict("it is there"), 409),
        (errors.EngineFailed("no memory"), 500),
    ],
)
async def test_error_of_an_adapter_command_has_its_status(client, commanded, failure, status):
    commanded.failure = failure

    answers = [await client.post("/v1/loras", json=body()), await client.delete("/v1/loras/poet")]

    assert [one.status_code for one in answers] == [status, status]
    assert answers[0].json() == {"error": {"message": str(failure), "code": status}}
