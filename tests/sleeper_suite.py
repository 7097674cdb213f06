"""The suite of tests for every `api.SleepController`. A module that imports it has fixtures `host` and `sleeper`."""

import pytest

PROMPT = list(range(3, 43))
ALL = [()]
BY_PARTS = [("weights",), ("kv_cache",)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("parts", [ALL, BY_PARTS])
async def test_answers_are_the_same_after_sleep(host, sleeper, level, parts):
    name = f"{level} {len(parts)}"
    before = await host.answer(f"{name} before", PROMPT, max_tokens=8)
    await host.engine.clear_kv_blocks()

    await sleeper.sleep(level)
    for tags in parts:
        is_awake = await sleeper.wake_up(tags)
    after = await host.answer(f"{name} after", PROMPT, max_tokens=8)

    assert is_awake
    assert after == before
    assert host.sink.of(f"{name} after")[0].cached_tokens == 0


async def test_the_engine_is_awake_once_all_memory_is_back(sleeper):
    await sleeper.sleep(1)

    assert not await sleeper.wake_up(["weights"])
    assert await sleeper.wake_up(["kv_cache"])
