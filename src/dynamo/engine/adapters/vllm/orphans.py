"""vLLM's processes end with the worker that started them, however it ended: left alone they would keep the GPU.

vLLM calls its plugins in each of its processes (our distribution names this one, see `pyproject.toml`), so this is
where they can ask the kernel. It imports nothing of vLLM, and does nothing in a vLLM that is not ours.
"""

import multiprocessing
import os

from dynamo.base import processes

OWNED = "DYN_VLLM_OWNED"  # in the environment of those that are ours


def end_with_parent() -> None:
    """From now on, or now if the parent has gone already."""
    parent = multiprocessing.parent_process()
    if parent is None or OWNED not in os.environ:
        return
    ask = processes.dies_with(parent.pid or 0)
    if ask is not None:
        ask()
