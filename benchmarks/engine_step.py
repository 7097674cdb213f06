"""How fast the native engine is: its runner alone, decoding at a fixed context, and the whole of it through its seam.

    python -m benchmarks.engine_step                  # the built-in model, one thread
    python -m benchmarks.engine_step --model PATH     # another checkpoint
    ... --profile                                     # and where the runner's time goes
    ... --reference                                   # and what transformers' generate() makes of it
    ... --device cuda                                 # on a GPU, by the clock; --shape qwen3-0.6b: random weights

Tokens per second of CPU time, as what else the machine does adds to wall time; through its caches it adds to CPU time
too, so the load average is printed, and median and best of several rounds. It also says whether answers are equal to
the bit alone and in a batch, which holds by construction as far as the machine's matrix kernels behave as those that
were examined (`dynamo.engine.native.attention`).
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import engine_whole, random_models
from dynamo.engine.native.runner import Runner
from dynamo.engine.native.sequence import Chunk, Sequence
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate
from dynamo.worker import model_source

BLOCK_SIZE = 16


def blocks_of(context: int) -> int:
    """For a prompt of so many tokens and the longest run."""
    return (context + 512) // BLOCK_SIZE + 1


def start(
    runner: Runner, batch: int, context: int, options: generate.SamplingOptions
) -> list[Sequence]:
    """Sequences with random prompts of `context` tokens, whose keys and values are in the cache."""
    num_blocks = blocks_of(context)
    sequences = []
    for i in range(batch):
        generator = torch.Generator().manual_seed(i)
        prompt = torch.randint(runner.config.vocab_size, (context,), generator=generator).tolist()
        request = generate.Request(
            id=str(i), model="bench", token_ids=blocks.pack(prompt), sampling_options=options
        )
        block_ids = list(range(i * num_blocks, (i + 1) * num_blocks))
        sequence = Sequence(
            request=request, index=0, token_ids=prompt, prompt_len=context, block_ids=block_ids
        )
        advance(runner, [Chunk(sequence=sequence, start=0, num_tokens=context, samples=True)])
        sequences.append(sequence)
    return sequences


def advance(runner: Runner, chunks: list[Chunk]) -> None:
    """One step."""
    for chunk, sampled in zip(chunks, runner.run(chunks), strict=True):
        chunk.sequence.token_ids.append(sampled.token_id)


def decode(runner: Runner, sequences: list[Sequence], steps: int) -> float:
    """Seconds of one step, on average: of CPU time, or by the clock if a GPU computes."""
    clock = time.process_time if runner.device_blocks is None else time.perf_counter
    began = clock()
    for _ in range(steps):
        chunks = [
            Chunk(sequence=s, start=len(s.token_ids) - 1, num_tokens=1, samples=True)
            for s in sequences
        ]
        advance(runner, chunks)
    return (clock() - began) / steps


def is_equal_alone(runner: Runner, sequences: list[Sequence]) -> bool:
    """Whether each sequence's logits are the same to the bit in a batch, alone, and after its prompt in two chunks."""
    ends = [len(sequence.token_ids) - 1 for sequence in sequences]

    def logits(sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        step = Chunk(sequence=sequence, start=start, num_tokens=stop - start, samples=True)
        return runner.logits([step])[0]

    together = runner.logits(
        [
            Chunk(sequence=sequence, start=end, num_tokens=1, samples=True)
            for sequence, end in zip(sequences, ends, strict=True)
        ]
    )
    for row, sequence, end in zip(together, sequences, ends, strict=True):
        alone = logits(sequence, end, end + 1)
        logits(sequence, 0, end // 3)
        in_chunks = logits(sequence, end // 3, end + 1)
        if not torch.equal(row, alone) or not torch.equal(row, in_chunks):
            return False
    return True


def bench_runner(model: Path, args: argparse.Namespace) -> None:
    """A line for each batch size and way of drawing."""
    unit = "CPU-second" if args.device == "cpu" else "second"
    runner = Runner(
        model,
        device=args.device,
        dtype=args.dtype,
        num_blocks=max(args.batches) * blocks_of(args.context),
        block_size=BLOCK_SIZE,
        threads=args.threads,
    )
    for batch in args.batches:
        num_steps = max(4, 40 // batch)
        for name, options in engine_whole.ways_to_draw(model).items():
            sequences = start(runner, batch, args.context, options)
            decode(runner, sequences, 2)  # a GPU's graph is captured
            steps = [decode(runner, sequences, num_steps) for _ in range(args.rounds)]
            middle, best = (batch / step for step in (statistics.median(steps), min(steps)))
            print(
                f"batch {batch:3}, {name:13} {middle:6.0f} tokens per {unit} (best {best:6.0f}),"
                f" {batch / middle * 1e3:6.2f} ms a step"
            )
        if args.profile:
            with torch.profiler.profile() as profile:
                decode(runner, sequences, num_steps)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    answer = "yes" if is_equal_alone(runner, sequences) else "no"
    print(f"logits equal to the bit in a batch of {batch}, alone and in chunks: {answer}")


def bench_reference(model: Path, args: argparse.Namespace) -> None:
    """Greedy decoding by transformers, in 32 bits as here."""
    import transformers  # an extra, and slow to import

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.set_num_threads(args.threads)
    for batch in args.batches:
        prompts = torch.randint(reference.config.vocab_size, (batch, args.context))
        num_tokens = engine_whole.ANSWER
        began = time.process_time()
        reference.generate(
            prompts, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
        )
        rate = batch * num_tokens / (time.process_time() - began)
        print(f"batch {batch:3}, greedy        {rate:6.0f} tokens per CPU-second")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=random_models.SHAPES, help="instead of --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--cache-gb", type=float, default=1.0, help="KV cache of the whole engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--reference", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Print it all."""
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as directory:
        if args.shape is not None:
            args.model = Path(directory, args.shape)
            random_models.make(args.model, args.shape, args.device)
        bench(args.model or model_source.built_in(), args)


def bench(model: Path, args: argparse.Namespace) -> None:
    """Print the figures of one model."""
    print(f"{model.name}, threads: {args.threads}, load average {os.getloadavg()[0]:.1f}")
    print("the runner alone:")
    bench_runner(model, args)
    print(f"the whole engine, decoding answers of {engine_whole.ANSWER} tokens:")
    settings = NativeConfig(
        device=args.device, threads=args.threads, dtype=args.dtype, kv_cache_memory_gb=args.cache_gb
    )
    asyncio.run(
        engine_whole.measure(
            model, settings, args.batches, context=args.context, rounds=args.rounds
        )
    )
    if args.reference:
        print("transformers:")
        bench_reference(model, args)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
