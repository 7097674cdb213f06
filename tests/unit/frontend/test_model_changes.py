"""The routes by which an operator loads, unloads, pins and unpins a model on demand."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.protocols import instances


async def offer(rig, *, loader):
    """Announce the model `q`, which is loaded on demand by this instance."""
    start = instances.WorkerStart(
        model="q",
        namespace="dynamo",
        estimate_s=12.0,
        is_on_demand=True,
        context_length=99,
        phase="unloaded",
        loader=loader,
    )
    key = f"{instances.STARTS}a-0-0"
    await rig.one.runtime.discovery.put(key, msgspec.json.encode(start))
    await rig.until(
        lambda: [each.loader for each in rig.frontend._expected_workers.on_demand] == [loader]
    )


@pytest.fixture
async def changes(rig):
    """What a process that loads `q` is asked for; it refuses to unload."""
    asked = []

    def change(call):
        asked.append(msgspec.msgpack.decode(call.body))
        if asked[-1]["action"] == "unload":
            call.fail(errors.Conflict("q is not unloaded: it is pinned: unpin it first"))
            return
        call.reply({"phase": "unloaded"})
        call.finish()

    await rig.one.runtime.register(instances.loader_endpoint("dynamo"), change)
    await offer(rig, loader=rig.one.runtime.instance_id)
    return asked


@pytest.mark.parametrize("action", ["load", "pin", "unpin"])
async def test_change_reaches_the_process_that_loads_the_model(rig, changes, action):
    answer = await rig.client.post(f"/models/{action}", json={"model": "q"})

    assert answer.status_code == 200
    assert answer.json() == {"success": True, "model": "q", "phase": "unloaded"}
    assert changes == [{"model": "q", "action": action}]


async def test_refused_change_says_why(rig, changes):
    answer = await rig.client.post("/models/unload", json={"model": "q"})

    assert answer.status_code == 409
    assert "it is pinned: unpin it first" in answer.json()["error"]["message"]


async def test_model_that_is_not_loaded_on_demand_is_not_found(rig):
    alone = await rig.client.post("/models/load", json={"model": "m"})
    await offer(rig, loader=77)
    beside = await rig.client.post("/models/load", json={"model": "m"})
    await offer(rig, loader=0)
    without = await rig.client.post("/models/load", json={"model": "q"})

    assert [answer.status_code for answer in (alone, beside, without)] == [404] * 3
    assert "one of `dynamo serve A B`, got 'm'" in alone.json()["error"]["message"]
    assert "one of q, got 'm'" in beside.json()["error"]["message"]


async def test_process_that_has_gone_is_named(rig):
    await offer(rig, loader=77)
    answer = await rig.client.post("/models/load", json={"model": "q"})

    assert answer.status_code == 503


@pytest.mark.parametrize("action", ["load", "unload", "pin", "unpin"])
async def test_change_needs_an_administrators_key(bare, tmp_path, action):
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice-1"\n')
    await bare.start(api_keys_file=str(path))
    alice = {"authorization": "Bearer sk-alice-1"}
    answer = await bare.client.post(f"/models/{action}", json={"model": "q"}, headers=alice)

    assert answer.status_code == 403
