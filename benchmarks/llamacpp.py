"""Decoding of the llama.cpp worker beside the library alone, in turns: `python -m benchmarks.llamacpp [--rounds 5]`.

The model has the shape of Qwen3-0.6B at 4 bits, with random weights; it is written once, beside the other caches. Both
sides run in this process, each with a server of its own, and both decode `--tokens` tokens of 1 and of 4 requests.
"""

import argparse
import asyncio
import concurrent.futures
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import gguf
import xllamacpp

from dynamo.engine.adapters.settings import LlamacppConfig
from dynamo.protocols import blocks, generate
from dynamo.worker import engines

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import gguf_models

PROMPT_TOKENS, CONTEXT, SLOTS = 64, 2048, 4


class Sink:
    """Counts the choices that have ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Semaphore(0)

    def outputs(self, batch) -> None:
        for item in batch:
            if item.output.finish_reason is not None:
                self.ended.release()

    def failed(self, request_id, error) -> None:
        raise error

    def kv_events(self, events, dp_rank=0) -> None:
        pass

    def died(self, error) -> None:
        raise error


def prompt(seed: int) -> list[int]:
    return [1000 + (seed * 7919 + i * 31) % 100_000 for i in range(PROMPT_TOKENS)]


async def run_engine(engine, sink, num_requests: int, num_tokens: int, seed: int) -> float:
    began = time.perf_counter()
    for i in range(num_requests):
        request = generate.Request(
            id=f"{seed}-{i}",
            model="m",
            token_ids=blocks.pack(prompt(seed * 10 + i)),
            stop_conditions=generate.StopConditions(max_tokens=num_tokens, ignore_eos=True),
            sampling_options=generate.SamplingOptions(temperature=0.0),
        )
        engine.submit(request)
    for _ in range(num_requests):
        await sink.ended.acquire()
    return num_requests * num_tokens / (time.perf_counter() - began)


def run_library(server, pool, num_requests: int, num_tokens: int, seed: int) -> float:
    began = time.perf_counter()
    options = {"n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    jobs = [
        pool.submit(server.handle_completions, {"prompt": prompt(seed * 10 + i), **options})
        for i in range(num_requests)
    ]
    for job in jobs:
        job.result()
    return num_requests * num_tokens / (time.perf_counter() - began)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    path = Path(tempfile.gettempdir()) / f"random-0.6B-{options.layers}-Q4_0.gguf"
    if not path.exists():
        draft = path.with_suffix(".draft")
        gguf_models.write_model(
            draft, vocab_size=151_936, hidden=1024, layers=options.layers, heads=16, kv_heads=8,
            head_dim=128, feed_forward=3072, context=CONTEXT,
            quantization=gguf.GGMLQuantizationType.Q4_0,
        )  # fmt: skip
        draft.rename(path)
    directory, sink = engines.find_model("llamacpp", str(path)), Sink()
    engine = engines.build("llamacpp", directory, LlamacppConfig(max_num_seqs=SLOTS))
    await engine.start(sink)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), CONTEXT * SLOTS, SLOTS
    params.fit_params, params.enable_chat_template, params.verbosity = False, False, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server, pool = xllamacpp.Server(params), concurrent.futures.ThreadPoolExecutor(SLOTS)
    print("| at once | ours, tokens/s | library alone | ratio of medians |\n|---|---|---|---|")
    for num_requests in (1, SLOTS):
        ours, alone = [], []
        for seed in range(options.rounds):
            ours.append(await run_engine(engine, sink, num_requests, options.tokens, seed))
            job = (run_library, server, pool, num_requests, options.tokens, seed)
            alone.append(await asyncio.to_thread(*job))
        median, other = statistics.median(ours), statistics.median(alone)
        print(f"| {num_requests} | {median:.1f}, best {max(ours):.1f} | {other:.1f}, best {max(alone):.1f} |"
              f" {median / other:.2f} |")  # fmt: skip
    print(f"load average {os.getloadavg()[0]:.1f}")
    sys.stdout.flush()
    os._exit(0)  # the library's destructor may wait for ever


if __name__ == "__main__":
    asyncio.run(main())
