"""`python -m dynamo.simulate tiers`: what a host tier is worth where users resend their history, round by round.

All users of one worker send a turn at once, and the next one when all have their answers. A prompt is the history with
new tokens. The engine's scheduler, block pool and tiers are the mock engine's, with the real decisions of
`kvbm.tiered_cache`; a step takes the time of an 8B model on one H100, and a copy that of its bytes at a bandwidth. All
times are virtual.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import config, errors
from dynamo.engine.mock import memory
from dynamo.protocols import blocks
from dynamo.router import worker_load
from dynamo.simulate import plan_worker, screen
from dynamo.simulate.workers import BatchWorker

Rounds = Sequence[float]
"""The mean time to first token of each round, in seconds."""
DrawRounds = Callable[[Mapping[str, Rounds], str, Path], Path]
_BLOCK = 64
_TIMES = plan_worker.h100_8b()
_DISK_BYTES_PER_S = 1e9  # of a tier that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """Simulate a host tier below the KV cache of one worker, in virtual time."""

    users: int = config.option(80, help="users that send at once", least=1)
    rounds: int = config.option(10, help="turns of each user", least=1)
    turn_tokens: int = config.option(1000, help="new prompt tokens of a turn", least=1)
    answer_tokens: int = config.option(100, help="tokens of an answer", least=1)
    cache_tokens: int = config.option(448_000, help="tokens in the engine's own cache", least=64)
    host_tokens: int = config.option(1_000_000, help="tokens in the host tier", least=64)
    host_gb_per_s: tuple[str, ...] = config.option(
        ("5", "25", "50"), help="bandwidths of copies to and from the host tier, in GB/s"
    )
    kv_bytes_per_token: int = config.option(131_072, help="bytes of a token in the cache", least=1)
    report_json: str | None = config.option(
        None, help="file for the mean seconds to the first token of each round as JSON"
    )
    output: str | None = config.option(None, help="directory for the plot, tiers.png")


class TieredWorker:
    """One simulated worker, with a host tier if it has a bandwidth, and its time."""

    def __init__(self, settings: TiersConfig, host_bytes_per_s: float | None) -> None:
        tiers = None
        if host_bytes_per_s is not None:
            tiers = memory.SimulatedTiersConfig(
                num_host_blocks=settings.host_tokens // _BLOCK,
                num_disk_blocks=0,
                host_bytes_per_s=host_bytes_per_s,
                disk_bytes_per_s=_DISK_BYTES_PER_S,
                block_size=_BLOCK,
                block_bytes=_BLOCK * settings.kv_bytes_per_token,
            )
        capacity = worker_load.Capacity(
            total_blocks=settings.cache_tokens // _BLOCK,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        step_s = functools.partial(_TIMES.batch_step_s, settings.cache_tokens)
        self._worker = BatchWorker(capacity, block_size=_BLOCK, step_s=step_s, tiers=tiers)
        self._now = 0.0

    def answer(
        self, prompts: Mapping[str, Sequence[int]], num_output: int
    ) -> tuple[float, dict[str, list[int]]]:
        """Answer prompts that come at once. Return their mean seconds to the first token, and the answers."""
        began_at, first_at = self._now, dict.fromkeys(prompts, 0.0)
        answers: dict[str, list[int]] = {name: [] for name in prompts}
        for name, tokens in prompts.items():
            self._worker.queue(name, blocks.pack(tokens), num_output)
        while self._worker.has_work:
            for name, output in self._worker.step(self._now):
                if not answers[name]:
                    first_at[name] = self._now - began_at
                answers[name] += output.token_ids
            if self._worker.has_work:
                self._now = self._worker.next_time
                if self._now == math.inf:
                    raise errors.EngineFailed("the simulated worker waits for nothing")
        return sum(first_at.values()) / len(first_at), answers


def simulate(settings: TiersConfig, host_bytes_per_s: float | None) -> Rounds:
    """Return the rounds of one worker; None: without a host tier."""
    worker = TieredWorker(settings, host_bytes_per_s)
    histories: dict[str, list[int]] = {str(user): [] for user in range(settings.users)}
    rounds = []
    for number in range(settings.rounds):
        for user, history in enumerate(histories.values()):
            first = (user * settings.rounds + number) * settings.turn_tokens
            history += range(first, first + settings.turn_tokens)
        mean_s, answers = worker.answer(histories, settings.answer_tokens)
        rounds.append(mean_s)
        for name, answer in answers.items():
            histories[name] += answer
    return rounds


def run(settings: TiersConfig, draw: DrawRounds | None) -> None:
    """Simulate all cells, and print each round with its change. Raises ConfigError."""
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    longest = settings.rounds * (settings.turn_tokens + settings.answer_tokens)
    if longest > settings.cache_tokens:
        raise errors.ConfigError(
            f"--cache-tokens {settings.cache_tokens}: expected room for the longest request, {longest:,}"
            " tokens with its answer"
        )
    rates = [_read_rate(text) for text in settings.host_gb_per_s]
    cells: dict[str, Rounds] = {"without": simulate(settings, None)}
    cells |= {f"{rate:g} GB/s": simulate(settings, rate * 1e9) for rate in rates}
    caption = (
        f"{settings.users} users, {settings.rounds} rounds of {settings.turn_tokens} + {settings.answer_tokens} tokens;"
        f" {settings.cache_tokens:,} tokens in the engine, {settings.host_tokens:,} in host memory"
    )
    sys.stdout.write(f"{caption}\nmean seconds to first token, and the change by a host tier\n")
    sys.stdout.write("\n".join(format_rows(cells)) + "\n")
    screen.write_json(settings.report_json, cells)
    if draw is not None and settings.output is not None:
        sys.stdout.write(f"wrote {draw(cells, caption, Path(settings.output))}\n")


def _read_rate(text: str) -> float:
    """Return a bandwidth in GB/s. Raises ConfigError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise errors.ConfigError(f"--host-gb-per-s: expected numbers above 0, got {text!r}")
    return rate


def format_rows(cells: Mapping[str, Rounds]) -> list[str]:
    """Return a line for each round, and one for the mean of all."""
    base, *others = cells.values()
    lines = ["round " + "".join(f"{name:>18}" for name in cells)]
    labels = [*map(str, range(len(base))), "mean"]
    for i, label in enumerate(labels):
        values = [
            rounds[i] if label != "mean" else sum(rounds) / len(rounds)
            for rounds in (base, *others)
        ]
        texts = [f"{value:.2f} ({value / values[0] - 1:+.0%})" for value in values[1:]]
        lines.append(f"{label:<6}{values[0]:>18.2f}" + "".join(f"{text:>18}" for text in texts))
    return lines
