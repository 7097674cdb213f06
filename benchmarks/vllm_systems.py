"""Systems over real vLLM on CPU that stand side by side: `vllm serve`, and our frontends and workers.

All serve one model of random weights, so large that a step takes the tens of milliseconds of a real engine, with the
same flags. An engine gets one thread: the other core is for those that are measured. Systems that are compared are up
together, one idle while the other is asked: idle, either takes 1 to 2 % of a core.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import drafts, load, systems

READY_LIMIT_S = 400.0
SHAPE = {  # with 32,000 words 0.25 billion weights, 0.5 GB
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "max_window_layers": 12,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # narrow ones answer with one word for ever
}
FLAGS = ["--enforce-eager", "--dtype", "bfloat16", "--block-size", "32", "--max-model-len", "1024"]
FLAGS += ["--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
}
GREEDY = {"temperature": 0, "ignore_eos": True}
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What runs. An engine's process is one that takes requests, for `engine` computes."""

    name: str
    urls: tuple[str, ...]
    frontends: tuple[int, ...] = ()  # process ids
    engines: tuple[int, ...]

    @property
    def pids(self) -> str:
        """As the load generator takes them: `core` is vLLM's part of `wk`."""
        cores = [child for pid in self.engines for child in load.children(pid)]
        named = {"fe": self.frontends, "wk": self.engines, "core": cores}
        return ",".join(
            f"{name}={'+'.join(map(str, pids))}" for name, pids in named.items() if pids
        )

    def ask(self, url: str, prompts: Path, **shape: object) -> Figures:
        """Streams of one length each; what the load generator found out."""
        arguments = ["--url", url, "--pids", self.pids, "--stream"]
        arguments += ["--prompts", str(prompts), "--extra", json.dumps(GREEDY)]
        arguments += [word for name, value in shape.items() for word in (f"--{name}", str(value))]
        return systems.generate_load(arguments, self.name)


def model_at(directory: Path, tokenizer: Path) -> Path:
    """A model of the shape above with the tokenizer that lies in the other directory, made if it is not there."""
    if directory.exists():
        return directory.resolve()
    torch.manual_seed(7)
    config = json.loads((tokenizer / "config.json").read_text()) | SHAPE
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    with drafts.whole(directory) as draft:
        model.to(torch.bfloat16).save_pretrained(draft)
        for file in tokenizer.glob("tokenizer*.json"):
            (draft / file.name).write_bytes(file.read_bytes())
    return directory.resolve()


@contextlib.contextmanager
def alone(model: Path, log: Path) -> Iterator[Served]:
    """`vllm serve`, nothing of ours."""
    port = systems.free_port()
    # What `vllm serve` runs. That command itself looks for a package `vllm`, and fails with `vllm-cpu`.
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    serve += ["--served-model-name", "m"]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *FLAGS]
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        process = _start(stack, serve, os.environ | ENVIRONMENT, log)
        systems.wait_for_workers(url, 0, [process], log, READY_LIMIT_S)
        yield Served(name="vllm serve", urls=(url,), engines=(process.pid,))


@contextlib.contextmanager
def ours(
    model: Path,
    log: Path,
    *,
    frontends: Sequence[Sequence[str]] = ((),),
    num_workers: int = 1,
    connector: str = "none",
    worker_flags: Sequence[str] = (),
) -> Iterator[Served]:
    """A frontend for each list of flags, and workers for all of them."""
    ports = [systems.free_port() for _ in frontends]
    worker = ["-m", "dynamo.vllm", "--model", str(model), "--served-model-name", "m"]
    worker += ["--connector", connector, *FLAGS, *worker_flags]
    with contextlib.ExitStack() as stack:
        environ = systems.environment(sys.executable, str(log.with_suffix(".d"))) | ENVIRONMENT
        asked = [
            _start(stack, ["-m", "dynamo.frontend", "--http-port", str(port), *flags], environ, log)
            for port, flags in zip(ports, frontends, strict=True)
        ]
        workers = [_start(stack, worker, environ, log) for _ in range(num_workers)]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        for url in urls:
            systems.wait_for_workers(url, num_workers, [*asked, *workers], log, READY_LIMIT_S)
        yield Served(
            name="ours over vLLM",
            urls=urls,
            frontends=tuple(one.pid for one in asked),
            engines=tuple(one.pid for one in workers),
        )


def _start(
    stack: contextlib.ExitStack, words: Sequence[str], environ: dict[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    output = stack.enter_context(log.open("a"))
    return systems.launch(stack, [sys.executable, *words], environ, output)
