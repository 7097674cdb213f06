"""When adapters may be loaded and unloaded, who hears of it in which order, and what is undone."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.protocols import model_errors
from dynamo.worker import loras


class World:
    """An engine with adapters, and who hears of them."""

    def __init__(self):
        self.names, self.heard = ["native"], []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.failure, self.refusal, self.is_ready = None, None, True

    def serves(self):
        return self.is_ready

    @property
    def lora_names(self):
        return tuple(self.names)

    async def load_lora(self, name, directory):
        await self.may_load.wait()
        if self.failure is not None:
            raise self.failure
        self.names.append(name)
        self.heard.append(f"load {name}")

    async def unload_lora(self, name):
        self.names.remove(name)
        self.heard.append(f"unload {name}")

    async def publish(self, names):
        if self.refusal is not None:
            raise self.refusal
        self.heard.append(names)


@pytest.fixture
def world():
    return World()


@pytest.fixture
async def asked(world):
    made = loras.Loras(world, world.publish, world.serves, load_s=60)
    made.begin("m")
    yield made
    await made.close()


@pytest.fixture
def poet(tmp_path):
    return make(tmp_path / "poet")


def make(directory):
    directory.mkdir()
    (directory / loras.FILE).write_text("{}")
    return directory


async def test_it_is_loaded_before_others_hear_of_it_and_unloaded_after(world, asked, poet):
    loaded = await asked.load("poet", poet)
    there = dict(asked.numbers)
    unloaded = await asked.unload("poet")

    assert world.heard == ["load poet", ("native", "poet"), ("native",), "unload poet"]
    assert there == {"native": 1, "poet": 2}
    assert (loaded, unloaded) == (2, 2)
    assert asked.numbers == {"native": 1}


async def test_to_load_it_again_from_the_same_place_is_no_error(world, asked, poet):
    numbers = [await asked.load("poet", poet) for _ in range(2)]

    assert numbers == [2, 2]
    assert world.heard == ["load poet", ("native", "poet")]


async def test_a_number_is_not_used_twice(asked, poet):
    await asked.load("poet", poet)
    await asked.unload("poet")

    assert await asked.load("poet", poet) == 3


async def test_one_of_the_start_can_be_unloaded(world, asked):
    await asked.unload("native")

    assert world.heard == [(), "unload native"]


async def test_two_at_once_take_turns(world, asked, poet, tmp_path):
    world.may_load.clear()
    tasks = [
        asyncio.create_task(asked.load(name, where))
        for name, where in (("poet", poet), ("clerk", make(tmp_path / "clerk")))
    ]
    await asyncio.sleep(0)
    world.may_load.set()

    assert await asyncio.gather(*tasks) == [2, 3]
    assert world.heard == [
        "load poet",
        ("native", "poet"),
        "load clerk",
        ("native", "poet", "clerk"),
    ]


async def test_names_that_are_taken_are_refused_with_the_reason(world, asked, poet, tmp_path):
    await asked.load("poet", poet)
    for name, says in (
        ("m", "is the model itself"),
        ("native", "is there, from the start: unload it first"),
        ("poet", f"is there, from {poet}: unload it first"),
    ):
        with pytest.raises(errors.Conflict, match=says):
            await asked.load(name, tmp_path)

    assert world.names == ["native", "poet"]


async def test_what_is_no_adapter_is_refused_before_the_engine_sees_it(world, asked, tmp_path):
    for where in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 999), tmp_path / "\0"):
        with pytest.raises(errors.InvalidRequest, match=r"with adapter_config\.json, got"):
            await asked.load("poet", where)

    assert world.heard == []


async def test_there_is_a_bound(asked, world, poet):
    world.names += [f"poet-{i}" for i in range(loras.MAX_ADAPTERS - 1)]
    asked.begin("m")

    with pytest.raises(errors.Conflict, match="there are 512 LoRA adapters here"):
        await asked.load("poet", poet)


async def test_one_that_nobody_could_find_is_unloaded_again(world, asked, poet):
    world.refusal = errors.Conflict("nobody is to find us now")

    with pytest.raises(errors.Conflict, match="nobody is to find us"):
        await asked.load("poet", poet)
    assert world.heard == ["load poet", "unload poet"]
    assert asked.numbers == {"native": 1}


async def test_an_engine_that_refuses_it_has_said_why_and_nobody_hears_of_it(world, asked, poet):
    world.failure = errors.InvalidRequest("rank 64 is too high")

    with pytest.raises(errors.InvalidRequest, match="rank 64"):
        await asked.load("poet", poet)
    assert world.heard == []
    assert asked.numbers == {"native": 1}


async def test_an_engine_that_is_not_done_in_time_is_given_up(world, poet):
    asked = loras.Loras(world, world.publish, world.serves, load_s=0.01)
    asked.begin("m")
    world.may_load.clear()

    with pytest.raises(errors.EngineFailed, match=r"'poet': not loaded within 0\.01 s"):
        await asked.load("poet", poet)
    assert asked.numbers == {"native": 1}


async def test_a_change_goes_on_though_its_caller_has_left(world, asked, poet):
    world.may_load.clear()
    caller = asyncio.create_task(asked.load("poet", poet))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    world.may_load.set()

    assert await asked.load("poet", poet) == 2  # behind it, and it is there
    assert world.heard == ["load poet", ("native", "poet")]


async def test_a_worker_that_stops_says_so(world, asked, poet):
    world.may_load.clear()
    waiting = asyncio.create_task(asked.load("poet", poet))
    await asyncio.sleep(0)
    await asked.close()

    with pytest.raises(errors.Conflict, match="the worker stops"):
        await waiting


async def test_one_that_is_not_there_cannot_be_unloaded(asked):
    with pytest.raises(model_errors.ModelNotFound, match="no LoRA adapter 'poet' here, but native"):
        await asked.unload("poet")


async def test_while_the_worker_does_not_serve_the_engine_is_left_alone(world, asked, poet):
    await asked.load("poet", poet)
    world.is_ready, heard = False, list(world.heard)

    for change in (asked.load("clerk", poet), asked.load("poet", poet), asked.unload("poet")):
        with pytest.raises(errors.Conflict, match="does not serve now: try again"):
            await change
    assert world.heard == heard


async def test_who_puts_it_to_sleep_waits_for_what_is_being_loaded(world, asked, poet, tmp_path):
    world.may_load.clear()
    loading = asyncio.create_task(asked.load("poet", poet))
    later = asyncio.create_task(asked.load("clerk", make(tmp_path / "clerk")))
    for _ in range(3):
        await asyncio.sleep(0)
    world.is_ready = False
    settling = asyncio.create_task(asked.settle())
    await asyncio.sleep(0)
    is_settled = settling.done()
    world.may_load.set()
    await settling

    assert not is_settled
    assert await loading == 2
    with pytest.raises(errors.Conflict, match="does not serve now"):
        await later
    assert world.heard == ["load poet", ("native", "poet")]


async def test_one_that_could_not_be_told_for_any_reason_is_unloaded_again(world, asked, poet):
    world.refusal = OSError("no space left")
    with pytest.raises(OSError, match="no space"):
        await asked.load("poet", poet)
    world.refusal = None

    assert world.names == ["native"]
    assert await asked.load("poet", poet) == 2
