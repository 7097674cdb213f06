"""A copy of another engine's blocks, between who asks for it (an engine's scheduler) and who makes it (`remote`)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.protocols import generate, kv_transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Blocks of a prompt that another engine has computed, and those of ours to copy them to; both may be none.

    The last token that is known is computed here in any case, because its logits are wanted: `num_tokens` are copied.
    """

    number: int  # by which its end is told
    request: generate.Request
    remote: kv_transfer.RemoteBlocks
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    num_tokens: int


class Owner(Protocol):
    """Whose the blocks are. May be called from the event loop."""

    def end_pull(self, number: int, *, is_copied: bool) -> None:
        """A copy has ended: whoever waited for it may go on."""
        ...

    def release_held(self, number: int) -> None:
        """Nobody needs these blocks any more; an unknown number is no error."""
        ...


PassOn = Callable[[Pull], Awaitable[None]]
