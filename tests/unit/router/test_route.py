"""The route of a LoRA adapter uses only workers that have the adapter; which workers can take a request over."""

import pytest
from routing_rig import Receiver, request

from dynamo.base import errors
from dynamo.router import route


@pytest.fixture(params=["kv", "round-robin"])
async def adapters(world, request):
    """Of three workers, the first two have the adapter."""
    await world.route(3, router_mode=request.param)
    world.whole, world.made = world.made, route.LoraRoute(world.made)
    world.made.set_model_cards({worker.id: None for worker in world.workers[:2]})
    return world


async def test_lora_route_uses_only_workers_with_the_adapter(adapters):
    for turn in range(4):
        await adapters.open(*range(turn * 1000, turn * 1000 + 100), lora_name="poet")

    assert [len(worker.calls) for worker in adapters.workers] == [2, 2, 0]
    assert adapters.made.preview_instance(request()) in {
        worker.id for worker in adapters.workers[:2]
    }


async def test_lora_route_intersects_with_allowed_instances(adapters):
    _, second, third = adapters.workers
    terms = route.RoutingOptions(allowed_instances={second.id, third.id})
    for _ in range(3):
        await adapters.made.open_stream(request(lora_name="poet"), Receiver(), terms)
    await adapters.until(lambda: adapters.num_calls == 3)

    assert len(second.calls) == 3
    assert adapters.made.preview_instance(request(), terms) == second.id


async def test_lora_route_without_workers_raises_no_workers(adapters):
    for worker in adapters.workers[:2]:
        await worker.runtime.close()
    await adapters.until(lambda: len(adapters.client.instances) == 1)

    with pytest.raises(errors.NoWorkers):
        await adapters.made.open_stream(request(lora_name="poet"), Receiver())
    assert not adapters.num_calls


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_no_worker_can_take_over_a_request_for_one_instance(world, mode, monkeypatch):
    """It would else be lost whenever its worker stands still for seconds, though it may not migrate."""
    await world.route(2, router_mode=mode)
    ids = {worker.id for worker in world.workers}
    found, open_stream = [], world.client.open

    async def note_alternatives(*arguments, alternatives, **options):
        found.append({*alternatives()})
        return await open_stream(*arguments, alternatives=alternatives, **options)

    monkeypatch.setattr(world.client, "open", note_alternatives)
    for instance_id in (None, world.workers[0].id):
        options = route.RoutingOptions(instance_id=instance_id)
        await world.made.open_stream(request(), Receiver(), options)

    assert found == [ids, set()]
