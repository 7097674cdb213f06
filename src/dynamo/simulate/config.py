"""The settings of `simulate routing`."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Route a workload over simulated workers, in virtual time, by one policy after the other."""

    scenario: Literal["routing"] = config.option(
        "routing",
        flag="",
        help="simulation to run: routing (or disagg, which has flags of its own)",
    )
    trace: str | None = config.option(
        None,
        help="trace file in Mooncake's format (JSON lines); without it, a synthetic workload (--prefixes)",
    )
    policy: tuple[str, ...] = config.option(
        ("round-robin", "least-loaded", "consistent-hash", "dynamo", "estimated-ttft"),
        help="router policies to compare: comma-separated, or repeat the flag",
    )
    workers: int = config.option(8, help="number of workers", least=1, most=10_000)
    engine: Literal["fcfs", "batch"] = config.option(
        "fcfs",
        help="fcfs: one prompt after the other at a constant rate, no decode;"
        " batch: scheduler and timing of the mock engine",
    )
    cache_tokens: int = config.option(
        3_000_000, help="KV cache of each worker in tokens; 0: unlimited (fcfs only)", least=0
    )
    load: float = config.option(
        0.8, help="fcfs: offered prompt tokens over those that the workers can compute", least=0.01
    )
    limit: int | None = config.option(
        None, help="number of requests to take from the trace", least=2
    )
    spread: bool = config.option(
        False, help="spread requests with one time stamp evenly over the time until the next one"
    )
    prefixes: int = config.option(32, help="synthetic workload: number of shared prefixes", least=1)
    prefix_tokens: int = config.option(2048, help="synthetic workload: tokens of a prefix", least=1)
    suffix_tokens: int = config.option(
        50, help="synthetic workload: tokens of a prompt after its prefix", least=1
    )
    output_tokens: int = config.option(
        16, help="synthetic workload: output tokens of a request", least=1
    )
    requests: int = config.option(960, help="synthetic workload: number of requests", least=1)
    concurrency: int = config.option(
        16, help="synthetic workload: clients, each with one request at a time", least=1
    )
    block_size: int = config.option(16, help="synthetic workload: tokens of a KV block", least=1)
    max_num_seqs: int = config.option(256, help="batch: sequences that may run at once", least=1)
    max_num_batched_tokens: int = config.option(
        8192, help="tokens that one step may compute", least=1
    )
    seed: int = config.option(0, help="seed of all random draws")
    output: str | None = config.option(
        None,
        help="directory for the plots (PNG) and report.html; needs matplotlib (the extra plots)",
    )

    def check(self) -> None:
        """Raise ConfigError for settings that contradict one another."""
        if self.engine == "batch" and not self.cache_tokens:
            raise errors.ConfigError(
                "--cache-tokens 0: expected a limited cache for --engine batch"
            )
        if self.trace is None and self.engine == "fcfs":
            raise errors.ConfigError(
                "expected --trace FILE, or --engine batch for a synthetic workload"
            )
        if not self.policy:
            raise errors.ConfigError("--policy: expected at least one")
