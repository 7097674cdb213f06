"""Prefixes of prompts, by the hashes of their blocks."""

from dynamo.console.shared_prefixes import MAX_BLOCKS, MAX_PROMPTS, RecentPrompts


def found(prompts, **fields):
    return [(one.hashes, one.num_prompts) for one in prompts.find_prefixes(**fields)]


def test_shared_prefix_comes_before_the_prompts_that_share_it():
    prompts = RecentPrompts()
    prompts.add("m", (1, 2, 3))
    prompts.add("m", (1, 2, 4, 5))
    prompts.add("m", (9,))

    assert found(prompts) == [((1, 2), 2), ((1, 2, 4, 5), 1), ((1, 2, 3), 1), ((9,), 1)]
    assert found(prompts, limit=1) == [((1, 2), 2)]


def test_prompt_that_is_repeated_counts_once_with_its_number():
    prompts = RecentPrompts()
    for _ in range(3):
        prompts.add("m", (1, 2))

    assert found(prompts) == [((1, 2), 3)]


def test_memory_is_bounded():
    prompts = RecentPrompts()
    prompts.add("m", ())
    for number in range(MAX_PROMPTS + 5):
        prompts.add("m", range(1000 * number, 1000 * number + 999))

    assert len(found(prompts, limit=1000)) == MAX_PROMPTS
    assert {len(hashes) for hashes, _ in found(prompts)} == {MAX_BLOCKS}


def test_prompts_of_different_models_share_nothing():
    """Models with one tokenizer have the same hashes for the same text, and caches of their own."""
    prompts = RecentPrompts()
    for model in ("small", "large"):
        prompts.add(model, (1, 2))
    prompts.add("large", (1, 3))

    assert [(one.model, one.hashes, one.num_prompts) for one in prompts.find_prefixes()] == [
        ("large", (1,), 2),
        ("small", (1, 2), 1),
        ("large", (1, 2), 1),
        ("large", (1, 3), 1),
    ]
