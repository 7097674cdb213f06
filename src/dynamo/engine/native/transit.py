"""Blocks that two engines share for a while: held here for a reader, or filled here from a holder.

A sequence whose prompt another engine has computed gets its blocks, as any other does, and then takes part in no step
(the state that vLLM calls WAITING_FOR_REMOTE_KVS) until the copy has ended. If it was copied, only its last token is
left to compute: the first of the answer if that came with the prompt, else the last of the prompt. If it was not, what
was not found here is computed here. A sequence that is aborted meanwhile leaves
its blocks behind: they belong to the copy, and are free when it ends.

A prompt that was computed for another engine leaves its blocks here as well, under a number, until somebody says
`release`. Who may say so, and when it is too late, is known to `remote`.
"""

from typing import Any

from dynamo.engine.native.paging import Paging
from dynamo.engine.native.sequence import Sequence
from dynamo.engine.pulls import Pull


class Transit:
    """Mutable; the scheduler owns it."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._pulling: dict[int, Sequence] = {}
        self._begun: list[Pull] = []
        self._held: dict[int, tuple[int, ...]] = {}
        self._last_number = 0

    @property
    def num_pulling(self) -> int:
        """Sequences that wait for a copy."""
        return len(self._pulling)

    def begin(self, sequence: Sequence) -> bool:
        """Ask for what it lacks, once; says whether it has to wait. It has just been given its blocks."""
        remote, sequence.remote = sequence.remote, None
        if remote is None:
            return False
        have, need = self._lacking(sequence, len(remote.remote_block_ids))
        pull = Pull(
            number=self._next_number(),
            request=sequence.request,
            remote=remote,
            local_blocks=tuple(sequence.block_ids[have:need]),
            remote_blocks=remote.remote_block_ids[have:need],
            num_tokens=len(sequence.token_ids) - 1 - sequence.num_computed if have < need else 0,
        )
        self._begun.append(pull)
        if have == need:
            return False
        sequence.is_pulling = True
        self._pulling[pull.number] = sequence
        return True

    def take_begun(self) -> list[Pull]:
        """The copies to make, and the holds that are not needed, since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def end(self, number: int, *, is_copied: bool) -> Sequence | None:
        """A copy has ended; gives the sequence that waited for it."""
        sequence = self._pulling.pop(number, None)
        if sequence is None:
            return None
        sequence.is_pulling = False
        if is_copied:
            sequence.num_computed = len(sequence.token_ids) - 1
            self._paging.commit(sequence)
        return sequence

    def hold(self, sequence: Sequence) -> dict[str, Any]:
        """Keep its blocks when it ends; gives what is known here of how to find them."""
        number = self._next_number()
        block_ids = tuple(sequence.block_ids)
        self._paging.retain(block_ids)
        self._held[number] = block_ids
        return {"remote_block_ids": block_ids, "remote_hold_id": number}

    def release(self, number: int) -> None:
        """Let go of held blocks. An unknown number is no error: a reader and the time limit may both say so."""
        self._paging.let_go(self._held.pop(number, ()))

    def _lacking(self, sequence: Sequence, num_remote: int) -> tuple[int, int]:
        """Which of its blocks, first to end: those without content that all tokens but the last need."""
        size = self._paging.block_size
        have, need = sequence.num_computed // size, -(-(len(sequence.token_ids) - 1) // size)
        is_of_use = need <= num_remote and not sequence.wants_prompt_logprobs
        return (have, need) if is_of_use and have < need else (0, 0)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number
