"""The workers that one command starts: all alike, or prefill and decode workers that divide the work."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["agg", "prefill", "decode"] | None  # the value of --disaggregation-mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`num_prefill` workers compute long prompts for the `num_answering` others."""

    num_answering: int = 1
    num_prefill: int = 0

    @property
    def modes(self) -> dict[str, Mode]:
        """The mode of each worker, by name; prefill workers first, so that the others find them."""
        mode: Mode = "decode" if self.num_prefill else None
        modes: dict[str, Mode] = {
            f"prefill worker {n + 1}": "prefill" for n in range(self.num_prefill)
        }
        return modes | dict.fromkeys(self.answering, mode)

    @property
    def answering(self) -> list[str]:
        """The names of the workers that clients' requests go to."""
        kind = "decode worker" if self.num_prefill else "worker"
        return [f"{kind} {n + 1}" for n in range(self.num_answering)]

    def describe(self) -> str:
        """Describe the topology in one line."""
        if not self.num_prefill:
            return (
                f"aggregated: {_count(self.num_answering, 'worker')}, computing prompts and answers"
            )
        return (
            f"disaggregated: long prompts are computed by {_count(self.num_prefill, 'prefill worker')},"
            f" answers by {_count(self.num_answering, 'decode worker')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
