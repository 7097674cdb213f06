"""The tests of salted prefix caches, for engines that keep requests of different tenants apart."""

from dynamo.protocols import blocks
from engine_suite import PROMPT, replay


async def test_prompt_is_found_in_the_cache_only_under_the_same_salt(host):
    prompt = range(3, 3 + host.facts.kv_block_size * 5 // 2)
    for number, salt in enumerate(("red", "blue", None, "red", None)):
        await host.answer(f"{number}", prompt, max_tokens=3, salt=salt)
    cached = [host.sink.of(f"{number}")[0].cached_tokens for number in range(5)]

    found = 2 * host.facts.kv_block_size
    assert cached == [0, 0, 0, found, found]


async def test_salted_blocks_are_published_under_salted_hashes(host):
    tokens = PROMPT + await host.answer("a", PROMPT, max_tokens=30, salt="red")
    seed = blocks.seed_of(None, "red")
    local = blocks.local_hashes(blocks.pack(tokens[:-1]), host.facts.kv_block_size, seed)
    names = blocks.sequence_hashes(local)
    await host.sink.until(lambda: len(replay(host.sink.events)) == len(names))

    assert list(replay(host.sink.events)) == names


async def test_salt_changes_no_answer(host):
    plain = await host.answer("a", PROMPT, max_tokens=12)
    salted = await host.answer("b", PROMPT, max_tokens=12, salt="red")

    assert salted == plain
