"""The suite of tests that every `api.LoraAdapterStore` passes.

A module that imports this has fixtures `host`, `loras` (without one called poet) and `directory`, which holds an
adapter that changes answers.
"""

import pytest

from dynamo.base import errors
from dynamo.protocols import blocks, generate

PROMPT = list(range(3, 103))


def ask(host, request_id, lora_name):
    host.engine.submit(
        generate.Request(
            id=request_id,
            model="m",
            lora_name=lora_name,
            token_ids=blocks.pack(PROMPT),
            stop_conditions=generate.StopConditions(max_tokens=8),
            sampling_options=generate.SamplingOptions(temperature=0.0),
        )
    )


async def answer(host, request_id, lora_name):
    ask(host, request_id, lora_name)
    await host.sink.until_ended(request_id)
    return host.sink.tokens(request_id)


async def test_a_loaded_adapter_answers_until_it_is_unloaded(host, loras, directory):
    others = loras.lora_names
    plain = await answer(host, "before", None)
    with pytest.raises(errors.WorkerLost, match="'poet' was asked for"):
        ask(host, "too early", "poet")

    await loras.load_lora("poet", directory)
    names = loras.lora_names
    written = await answer(host, "poet", "poet")
    untouched = await answer(host, "meanwhile", None)
    await loras.unload_lora("poet")

    assert names == (*others, "poet")
    assert loras.lora_names == others
    assert written != plain == untouched
    with pytest.raises(errors.WorkerLost, match="'poet' was asked for"):
        ask(host, "too late", "poet")


async def test_running_requests_go_on_when_their_adapter_is_unloaded(host, loras, directory):
    await loras.load_lora("poet", directory)
    expected = await answer(host, "in peace", "poet")

    ask(host, "running", "poet")
    await loras.unload_lora("poet")
    await host.sink.until_ended("running")

    assert host.sink.tokens("running") == expected


async def test_an_unloaded_name_can_be_loaded_again(host, loras, directory):
    await loras.load_lora("poet", directory)
    first = await answer(host, "first", "poet")
    await loras.unload_lora("poet")

    await loras.load_lora("poet", directory)

    assert await answer(host, "second", "poet") == first
