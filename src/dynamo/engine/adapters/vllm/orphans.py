"""Processes of vLLM that end with the worker that started them, however it ended: orphans would keep the GPU.

vLLM calls its plugins in each of its processes, and our distribution registers this module as one (`pyproject.toml`):
there a process can ask the kernel to be killed with its parent. The module imports nothing of vLLM, and does nothing in
a vLLM that another program started.
"""

import multiprocessing
import os

from dynamo.base import processes

OWNED = "DYN_VLLM_OWNED"  # set in the environment of the processes that a worker starts


def end_with_parent() -> None:
    """End this process when its parent ends, or now if the parent has ended already."""
    parent = multiprocessing.parent_process()
    if parent is None or OWNED not in os.environ:
        return
    request_kill = processes.dies_with(parent.pid or 0)
    if request_kill is not None:
        request_kill()
