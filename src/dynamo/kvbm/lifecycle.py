"""The life cycle of a KV block, with the names of Dynamo's KVBM, as states and the transitions between them.

    RESET ──allocate──▶ PARTIAL ──fill──▶ COMPLETE ──register──▶ REGISTERED
      ▲                    │                 │  ▲                  │    │
      └──────release───────┴─────release─────┘  └──clear, in use───┘    │
      └───────────────────────────evict, or clear while unused──────────┘

A block holds nothing that can be asked for (RESET), is written by one sequence (PARTIAL), is full and does not change
any more (COMPLETE), or can be found by its content as well (REGISTERED). A registered block stays so when its last
sequence releases it: it waits to be matched again, until it is evicted.
The pool derives a block's state from its own fields; its tests hold it to `TRANSITIONS` after any history.
"""

from dataclasses import dataclass
from enum import StrEnum


class BlockState(StrEnum):
    """A state of the life cycle."""

    RESET = "reset"
    PARTIAL = "partial"
    COMPLETE = "complete"
    REGISTERED = "registered"


_S = BlockState
TRANSITIONS = frozenset(
    (
        (_S.RESET, _S.PARTIAL),  # allocate
        (_S.PARTIAL, _S.COMPLETE),  # the sequence has filled it
        (
            _S.COMPLETE,
            _S.REGISTERED,
        ),  # its content is the first of its kind, and its parent can be found
        (_S.PARTIAL, _S.RESET),  # released before it was full
        (_S.COMPLETE, _S.RESET),  # released, and private to its sequence
        (_S.REGISTERED, _S.COMPLETE),  # cleared while a sequence uses it
        (_S.REGISTERED, _S.RESET),  # evicted, or cleared while no sequence uses it
    )
)


@dataclass(frozen=True, slots=True)
class RegisteredBlock:
    """The content of a block, by its names (`protocols.blocks`)."""

    sequence_hash: int
    local_hash: int
    parent_hash: int | None
