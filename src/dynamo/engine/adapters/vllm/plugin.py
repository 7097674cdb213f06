"""What makes the processes of vLLM good children of the worker that started them.

vLLM calls its plugins in each of its processes, and our distribution registers `adopt` as one (`pyproject.toml`). There
a process can ask the kernel to be killed with its parent, however that ends: orphans would keep the GPU. It leaves the
parent's process group, because Ctrl-C goes to the whole group, and the parent has requests to finish. And NIXL's
progress thread, which polls without a pause, is made to sleep between two looks, and the process ends quickly.

vLLM reads its logging configuration from `logging.json` beside this module (`VLLM_LOGGING_CONFIG_PATH`), in every
process and before it logs anything; it calls `log_handler`.

The module imports nothing of vLLM, and does nothing in a vLLM that another program started.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

from dynamo.base import process_setup
from dynamo.observability import logs

OWNED = "DYN_VLLM_OWNED"  # set in the environment of the processes that a worker starts
NIXL_PAUSE = "DYN_VLLM_NIXL_PAUSE_US"  # set where NIXL is used: microseconds between two looks
LOGGING_CONFIG = Path(__file__).with_name("logging.json")
_FOREIGN_LOGGERS = ("vllm", "nixl")
_TALKATIVE_LOGGERS = (  # at debug, some lines for every token, or for every few seconds of nothing
    "vllm.v1.worker.gpu_model_runner",
    "vllm.distributed.device_communicators.shm_broadcast",
)


def adopt() -> None:
    """Make this process of vLLM a child of the worker that started it; it ends now if the worker has ended already."""
    parent = multiprocessing.parent_process()
    if parent is None or OWNED not in os.environ:
        return
    request_kill = process_setup.dies_with(parent.pid or 0)
    if request_kill is not None:
        request_kill()
    util.Finalize(None, end_at_once, exitpriority=-100)
    os.dup2(2, 1)  # standard output belongs to no logs
    with contextlib.suppress(PermissionError):  # the leader of a session stays in its group
        os.setpgid(0, 0)
    if NIXL_PAUSE in os.environ:
        pause_nixl(int(os.environ[NIXL_PAUSE]))


def end_at_once() -> None:
    """End this process of vLLM quickly if it has not failed; its own processes have ended."""
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        process_setup.end_now(0)


def pause_nixl(pause_us: int) -> None:
    """Make the progress threads of NIXL's agents sleep for so many microseconds between two looks.

    NIXL has that setting for an agent (`pthrDelay`), and its Python interface sets it to 0, a whole core.
    """
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    config = bindings.nixlAgentConfig
    delay = config.pthrDelay
    pausing = property(delay.fget, lambda self, delay_us: delay.fset(self, delay_us or pause_us))
    bindings.nixlAgentConfig = type("PausingConfig", (config,), {"pthrDelay": pausing})
    _take_over_loggers()  # importing NIXL has given its logger a handler of its own


def log_handler() -> logging.Handler:
    """Return the handler of our own logs for vLLM's, after setting up the logging of this process if it has none."""
    root = logging.getLogger()
    if multiprocessing.parent_process() is not None or not root.handlers:
        # Older releases (0.28) put the name of the process before each line that is written by `sys.stderr`.
        logs.configure(stream=os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False))
    logging.captureWarnings(True)
    _take_over_loggers()
    return root.handlers[0]


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Block Ctrl-C in this thread and in the processes that it starts, which have no group of their own yet."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _take_over_loggers() -> None:
    """Let the loggers of vLLM and NIXL write what ours write: at their level, by the root's handler."""
    for name in _FOREIGN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.getLogger("dynamo").level)
    for name in _TALKATIVE_LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(max(logging.INFO, logging.getLogger("vllm").level))
