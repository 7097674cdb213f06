"""The rows of the frontend's benchmark: what is loaded, which figure is taken, and what it should be.

Every engine is simulated. *Paced*: one step every 2 ms (the real Dynamo's by its own timing formula, whose step of
5.74 ms becomes 2); *unpaced*: as fast as it goes; *long*: unpaced too, with the peer's fastest tokenizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Pace = Literal["paced", "unpaced", "long"]
Figures = Mapping[str, Any]  # a line of the load generator

OUR_WORKER: Mapping[Pace, tuple[str, ...]] = {
    "paced": ("--tick-ms", "2"),
    "unpaced": ("--speedup-ratio", "1000000"),
    "long": ("--speedup-ratio", "1000000"),
}
PEER_WORKER: Mapping[Pace, tuple[str, ...]] = {**OUR_WORKER, "paced": ("--speedup-ratio", "2.87")}
PEER_FRONTEND: Mapping[Pace, tuple[str, ...]] = {
    "paced": (),
    "unpaced": (),
    "long": ("--tokenizer", "fastokens"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """At most this, or at most this share of the peer's."""

    most: float
    is_ratio: bool = False

    def is_met(self, ours: float, peers: float | None) -> bool | None:
        """None: there is no peer to compare with."""
        if not self.is_ratio:
            return ours <= self.most
        return None if peers is None else ours <= self.most * peers

    def __str__(self) -> str:
        return f"≤ {self.most:g}" + (" ×" if self.is_ratio else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row. `prompts` names a file of prompts, of which each round has its own if it ends with a number."""

    name: str
    pace: Pace
    conc: int
    requests: int
    num_tokens: int = 1  # of each answer
    stream: bool = False
    prompts: str = "short"
    unit: str
    figure: Callable[[Figures], float]
    goal: Goal | None = None

    def arguments(self, prompts: str) -> list[str]:
        """For the load generator."""
        shape = ["--stream"] if self.stream else []
        amount = ["--conc", str(self.conc), "--n", str(self.requests)]
        return [*amount, "--osl", str(self.num_tokens), "--prompts", prompts, *shape]


def token_cpu_us(row: Figures) -> float:
    """Frontend CPU per token asked for."""
    return float(row["cpu_ms_per_1k_tok"]["fe"])


def request_cpu_us(row: Figures) -> float:
    """Frontend CPU per request."""
    return float(row["cpu_ms_per_req"]["fe"]) * 1000


def ttft_ms(row: Figures) -> float:
    """From the request to the first text, median."""
    return float(row["ttft_ms"]["p50"])


def _streamed(name: str, pace: Pace, conc: int, requests: int, share: float) -> Cell:
    return Cell(
        name=f"token of a stream, {name}", pace=pace, conc=conc, requests=requests, num_tokens=128,
        stream=True, unit="µs CPU", figure=token_cpu_us, goal=Goal(most=share, is_ratio=True),
    )  # fmt: skip


def _short(conc: int) -> Cell:
    return Cell(
        name=f"short request, {conc} at once", pace="unpaced", conc=conc, requests=4000,
        unit="µs CPU", figure=request_cpu_us, goal=Goal(most=0.3, is_ratio=True),
    )  # fmt: skip


def _long(num_tokens: int, kind: str, text: str, requests: int, goal: Goal | None) -> Cell:
    return Cell(
        name=f"{num_tokens:,} tokens, {text}", pace="long", conc=1, requests=requests,
        prompts=f"{kind}-{num_tokens}", unit="µs CPU", figure=request_cpu_us, goal=goal,
    )  # fmt: skip


_AS_FAST = Goal(most=1.0, is_ratio=True)
_HALF = Goal(most=0.5, is_ratio=True)
CELLS = (
    _streamed("32 at once, paced", "paced", 32, 256, 0.45),
    _streamed("128 at once, paced", "paced", 128, 512, 0.45),
    _streamed("128 at once, unpaced", "unpaced", 128, 1024, 0.25),
    _short(16),
    _short(64),
    Cell(
        name="first token, one kept connection, engine at once", pace="unpaced", conc=1,
        requests=200, num_tokens=16, stream=True, unit="ms", figure=ttft_ms, goal=Goal(most=2.0),
    ),
    _long(8000, "known", "new turn under a known system prompt", 150, _HALF),
    _long(32000, "known", "new turn under a known system prompt", 60, _HALF),
    _long(8000, "distinct", "all new", 40, _AS_FAST),
    _long(32000, "distinct", "all new", 20, _AS_FAST),
)  # fmt: skip
MEMORY = Goal(most=0.4, is_ratio=True)  # of the frontend of the unpaced cells, after them
START = Goal(most=1.0)  # s, until the frontend answers /health
TWO_PROCESSES = 1.8  # times the throughput of one, at least
