"""What a simulation can be told."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Route a workload over simulated workers, in virtual time, by one policy after the other."""

    what: Literal["routing"] = config.option(
        "routing", flag="", help="what to simulate: routing (or disagg, which has flags of its own)"
    )
    trace: str | None = config.option(
        None, help="file in Mooncake's format (JSON lines); without it, --prefixes make a workload"
    )
    policy: tuple[str, ...] = config.option(
        ("round-robin", "least-loaded", "consistent-hash", "dynamo", "estimated-ttft"),
        help="to compare: comma-separated, or the flag again",
    )
    workers: int = config.option(8, help="how many", least=1, most=10_000)
    engine: Literal["fcfs", "batch"] = config.option(
        "fcfs",
        help="fcfs: one prompt after the other at a constant rate, no decoding;"
        " batch: the simulated engine's scheduler and timing",
    )
    cache_tokens: int = config.option(
        3_000_000, help="KV cache of each worker; 0: no end (fcfs only)", least=0
    )
    load: float = config.option(
        0.8, help="fcfs: prompt tokens offered over what the workers could compute", least=0.01
    )
    limit: int | None = config.option(None, help="requests of the trace to take", least=2)
    spread: bool = config.option(
        False, help="spread requests with one time stamp over the time until the next one"
    )
    prefixes: int = config.option(
        32, help="made-up workload: prompts begin with one of so many", least=1
    )
    prefix_tokens: int = config.option(2048, help="tokens of each", least=1)
    suffix_tokens: int = config.option(50, help="tokens of each prompt's own end", least=1)
    output_tokens: int = config.option(16, help="tokens of each answer", least=1)
    requests: int = config.option(960, help="how many", least=1)
    concurrency: int = config.option(
        16, help="clients, each of which asks again when answered", least=1
    )
    block_size: int = config.option(16, help="made-up workload: tokens of a block", least=1)
    max_num_seqs: int = config.option(256, help="batch: sequences that may run at once", least=1)
    max_num_batched_tokens: int = config.option(
        8192, help="tokens that a step may compute", least=1
    )
    seed: int = config.option(0, help="of whatever is drawn")
    output: str | None = config.option(
        None,
        help="directory for the plots (PNG) and report.html; needs matplotlib (the extra plots)",
    )

    def check(self) -> None:
        """What the types cannot say. Raises ConfigError."""
        if self.engine == "batch" and not self.cache_tokens:
            raise errors.ConfigError(
                "--cache-tokens 0: expected a cache with an end for --engine batch"
            )
        if self.trace is None and self.engine == "fcfs":
            raise errors.ConfigError(
                "expected --trace FILE, or --engine batch for a made-up workload"
            )
        if not self.policy:
            raise errors.ConfigError("--policy: expected one at least")
