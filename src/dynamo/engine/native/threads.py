"""The number of CPU threads that compute a step.

Threads share a matrix product and synchronize after each one. Where the matrices are small, synchronization takes
longer than the sharing saves; and where another process uses the cores too, it waits for the thread that has lost its
core. So a small model is computed by one thread, and only large matrices by all cores. Waiting threads must sleep, not
spin, or they take the cores from those they wait for: `OMP_WAIT_POLICY`, which the worker sets before torch is loaded
(`worker.engines`).
"""

from typing import NamedTuple

from dynamo.engine.native.config import ModelConfig
from dynamo.engine.native.model_files import EncoderConfig

# Weights of a layer's largest matrix from which sharing pays: reading them takes about ten times one synchronization.
SPLIT_WEIGHTS = 2**20


class ThreadChoice(NamedTuple):
    """A number of threads, and the reason for the log."""

    number: int
    reason: str


def choose(
    model: ModelConfig | EncoderConfig,
    *,
    requested: int | None,
    omp_num_threads: str | None,
    cores: int,
    cpu_max: str,
) -> ThreadChoice:
    """Choose by the flag, else by OMP_NUM_THREADS (`cores` follows it), else by the size of the model.

    `cpu_max` is the content of the cgroup's file of that name, the CPU limit of a container; "" if there is none.
    """
    if requested is not None:
        return ThreadChoice(requested, "as --threads says")
    if omp_num_threads:
        return ThreadChoice(cores, "as OMP_NUM_THREADS says")
    largest = 2 * model.hidden_size * model.intermediate_size  # gate and up are one matrix
    if largest < SPLIT_WEIGHTS:
        return ThreadChoice(1, "the model's matrices are too small to be split")
    quota, _, period = cpu_max.partition(" ")
    if quota.isdigit() and period.strip().isdigit():  # without a limit it is "max 100000"
        cores = min(cores, max(1, int(quota) // int(period)))
    return ThreadChoice(cores, "all cores that this process may use")
