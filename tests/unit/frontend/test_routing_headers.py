"""Headers and hints that name the worker of a request, and its priority."""

import pytest

from dynamo.base import errors
from dynamo.frontend import routing_headers
from dynamo.preprocess import preprocessor
from dynamo.protocols import generate
from dynamo.router import config


async def ask(rig, headers, **fields):
    body = {"model": "m", "prompt": "x", **fields}
    return await rig.client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("name", routing_headers.INSTANCE)
async def test_header_overrides_the_worker_in_the_body(rig, name):
    other = await rig.worker()
    nvext = {"backend_instance_id": rig.one.instance.instance_id}
    for _ in range(3):
        await ask(rig, {name: str(other.instance.instance_id)}, nvext=nvext)

    assert (len(other.requests), len(rig.one.requests)) == (3, 0)


async def test_decode_worker_id_names_the_worker(rig):
    other = await rig.worker()
    for _ in range(3):
        await ask(rig, {}, nvext={"decode_worker_id": other.instance.instance_id})

    assert (len(other.requests), len(rig.one.requests)) == (3, 0)


async def test_rank_and_session_reach_the_worker(rig):
    nvext = {
        "agent_hints": {"priority": 3, "osl": 77},
        "session_control": {"session_id": "body", "action": "bind", "timeout": 9},
    }
    await ask(rig, {"x-dp-rank": "1", "x-dynamo-session-id": "header"}, nvext=nvext)
    await ask(rig, {}, nvext=nvext, priority=4)
    first, second = rig.one.requests

    assert (first.priority, first.expected_output_tokens) == (3, 77)
    assert (first.data_parallel_rank, first.session_id) == (1, "header")
    assert (second.priority, second.session_id) == (-4, "body")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-worker-instance-id", "abc"),
        ("x-dynamo-worker-instance-id", "-1"),
        ("x-dp-rank", "1.5"),
        ("x-dynamo-dp-rank", "9" * 30),
        ("x-dynamo-session-id", "s" * 201),
    ],
)
async def test_invalid_header_is_named(rig, name, value):
    answer = await ask(rig, {name: value})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_request_without_routing_headers_is_unchanged():
    request = generate.Request(id="r", model="m", token_ids=b"1234", session_id="s")
    prompts = [preprocessor.Prepared(request, None)]

    assert routing_headers.parse_headers({"host": "x"}).apply(prompts) is prompts


def test_instance_id_beyond_64_bits_is_refused():
    with pytest.raises(errors.InvalidRequest, match="from 0 to 9223372036854775807"):
        routing_headers.parse_headers({"x-worker-instance-id": str(2**63)})


async def test_session_stays_with_its_worker(bare):
    keeps = config.RoutingConfig(router_mode="kv", router_session_affinity_ttl_secs=60.0)
    await bare.start(keeps)
    workers = [await bare.worker() for _ in range(3)]

    for number in range(6):
        headers = {"x-dynamo-session-id": "s"}
        answer = await ask(bare, headers, prompt=f"{number} {'x' * 100}")
        assert answer.status_code == 200

    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 6]
