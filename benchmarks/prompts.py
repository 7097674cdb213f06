"""Prompt files for the benchmarks: short ones, long ones, and long ones of which most is known.

The text is slices of the standard library's source, so it differs between Pythons and is the same for all systems of
one run. It repeats words, which caches of word pieces like.
"""

import json
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import tokenizers

USER_TOKENS = 150
SLICE_LINES = 40


class Sampler:
    """Text of a wanted length in tokens, the same for the same seed."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
        text = "".join(file.read_text("utf-8", "replace") for file in files)
        self._lines = text.split("\n")

    def text(self, num_tokens: int, seed: object) -> str:
        """About `num_tokens` tokens, never more."""
        draw = random.Random(str(seed))
        starts = (
            draw.randrange(len(self._lines) - SLICE_LINES) for _ in range(num_tokens // 40 + 2)
        )
        text = "\n".join("\n".join(self._lines[at : at + SLICE_LINES]) for at in starts)
        ids = self._tokenizer.encode(text).ids[:num_tokens]
        return self._tokenizer.decode(ids)


def short(path: Path) -> None:
    """20,000 different ones of one line."""
    _write(path, (f"Say hello to guest number {number} please." for number in range(20_000)))


def distinct(path: Path, sampler: Sampler, num_tokens: int, count: int, seed: object) -> None:
    """Nothing in common."""
    names = (f"{seed} {number}" for number in range(count))
    _write(path, (f"#{name} " + sampler.text(num_tokens, name) for name in names))


def known(path: Path, sampler: Sampler, num_tokens: int, count: int, seed: object) -> None:
    """One system prompt, the same for all seeds, and each time another turn of the user."""
    system = {"role": "system", "content": sampler.text(num_tokens - USER_TOKENS, "system")}
    turns = (sampler.text(USER_TOKENS, f"{seed} {number}") for number in range(count))
    _write(path, ({"messages": [system, {"role": "user", "content": turn}]} for turn in turns))


def prefixed(
    path: Path, sampler: Sampler, num_prefixes: int, prefix_tokens: int, count: int
) -> None:
    """Each with one of a few system prompts, all equally often and in random order, and a short turn of its own."""
    texts = [sampler.text(prefix_tokens, f"prefix {number}") for number in range(num_prefixes)]
    order = [number % num_prefixes for number in range(count)]
    random.Random(7).shuffle(order)
    turns = (f"q{number} {sampler.text(32, f'turn {number}')}" for number in range(count))
    chats = (
        [{"role": "system", "content": texts[k]}, {"role": "user", "content": turn}]
        for k, turn in zip(order, turns, strict=True)
    )
    _write(path, ({"messages": chat} for chat in chats))


def _write(path: Path, items: Iterable[object]) -> None:
    path.write_text("\n".join(map(json.dumps, items)))
