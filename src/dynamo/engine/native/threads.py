"""How many CPU threads compute a step.

Threads share a matrix product, and meet after each one. Where the matrices are small, meeting takes longer than
what is shared saves; and where another process wants the cores too, each meeting waits for whoever has lost its core.
So a small model is computed by one thread, and only large matrices by all cores. Threads that wait must sleep, not
spin, or they take the cores from those they wait for: `OMP_WAIT_POLICY`, which the worker sets before torch is loaded
(`worker.engines`).
"""

from typing import NamedTuple

from dynamo.engine.native.config import ModelConfig
from dynamo.engine.native.encoder_config import EncoderConfig

# Weights of a layer's largest matrix that are worth splitting: reading them takes about ten times as long as to meet.
SPLIT_WEIGHTS = 2**20


class Threads(NamedTuple):
    """How many, and why."""

    number: int
    reason: str


def choose(
    model: ModelConfig | EncoderConfig,
    *,
    asked: int | None,
    environment: str | None,
    cores: int,
    cpu_max: str,
) -> Threads:
    """By the flag, else by OMP_NUM_THREADS (`cores` follows it), else by the size of the model.

    `cpu_max` is the cgroup's file of that name ("" if there is none): what a container may use of the machine.
    """
    if asked is not None:
        return Threads(asked, "as --threads says")
    if environment:
        return Threads(cores, "as OMP_NUM_THREADS says")
    largest = 2 * model.hidden_size * model.intermediate_size  # gate and up are one matrix
    if largest < SPLIT_WEIGHTS:
        return Threads(1, "the model's matrices are too small to be split")
    return Threads(_within(cpu_max, cores), "all cores that this process may use")


def _within(cpu_max: str, cores: int) -> int:
    quota, _, period = cpu_max.partition(" ")
    if not (quota.isdigit() and period.strip().isdigit()):  # "max 100000"
        return cores
    return min(cores, max(1, int(quota) // int(period)))
