"""The simulated engine's blocks between it and others: held here for a reader, or filled here from a holder.

The rules are the native engine's: a choice whose prompt another has computed gets its blocks and then takes part in no
step until the copy has ended; one that is aborted meanwhile leaves its blocks to the copy. What is simulated is the
content. A block holds its own name, and is looked at after the copy: had the holder's been given to others meanwhile,
the answer would be another, as that of a real engine would be.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dynamo.engine.mock.memory import Choice, Memory
from dynamo.engine.pulls import Pull


class Lending:
    """Mutable; one event loop owns it. Ranks of an engine share `numbers`, and lie behind one another in its region."""

    def __init__(
        self, memory: Memory, *, first_block: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        self._memory = memory
        self._first_block = first_block
        self._numbers = numbers or itertools.count(1)
        self._pulling: dict[int, Choice] = {}
        self._begun: list[Pull] = []
        self._held: dict[int, tuple[int, ...]] = {}

    @property
    def num_pulling(self) -> int:
        """Choices that wait for a copy."""
        return len(self._pulling)

    def begin(self, choice: Choice) -> bool:
        """Ask for what it lacks, once; says whether it has to wait. It has just been given its blocks."""
        remote, choice.remote = choice.remote, None
        if remote is None:
            return False
        have, need = self._lacking(choice, len(remote.remote_block_ids))
        number = next(self._numbers)
        self._begun.append(
            Pull(
                number=number,
                request=choice.request,
                remote=remote,
                local_blocks=tuple(self._first_block + i for i in choice.block_ids[have:need]),
                remote_blocks=remote.remote_block_ids[have:need],
                num_tokens=choice.prompt_len - 1 - choice.num_computed if have < need else 0,
            )
        )
        if have < need:
            choice.is_pulling = True
            self._pulling[number] = choice
        return choice.is_pulling

    def take_begun(self) -> list[Pull]:
        """The copies to make, and the holds that are not needed, since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def end(self, number: int, *, is_copied: bool) -> Choice | None:
        """A copy has ended; gives the choice that waited for it, if it still does."""
        choice = self._pulling.pop(number, None)
        if choice is None:
            return None
        choice.is_pulling = False
        if choice.is_aborted:
            self._memory.release(choice)
            return None
        if is_copied:
            if not self._memory.is_as_named(choice):
                choice.answer = replace(choice.answer, start=choice.answer.start + 1)
            choice.num_computed = choice.prompt_len - 1
        return choice

    def hold(self, choice: Choice) -> dict[str, Any]:
        """Keep its blocks when it ends; gives what is known here of how to find them."""
        number, block_ids = next(self._numbers), tuple(choice.block_ids)
        self._memory.pool.retain(block_ids)
        self._held[number] = block_ids
        ids = tuple(self._first_block + i for i in block_ids)
        return {"remote_block_ids": ids, "remote_hold_id": number}

    def release(self, number: int) -> None:
        """Let go of held blocks. An unknown number is no error: a reader and the time limit may both say so."""
        self._memory.pool.release(self._held.pop(number, ()))

    def _lacking(self, choice: Choice, num_remote: int) -> tuple[int, int]:
        """Which of its blocks, first to end: those without content that all tokens but the last need."""
        size = self._memory.block_size
        have, need = choice.num_computed // size, -(-(choice.prompt_len - 1) // size)
        wants_scores = choice.request.output_options.prompt_logprobs is not None
        is_of_use = have < need <= num_remote and not wants_scores
        return (have, need) if is_of_use else (0, 0)
