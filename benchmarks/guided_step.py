"""What it costs to hold answers to a grammar: CPU time of the sampler alone, for batches with none, one and all guided.

    python -m benchmarks.guided_step                  # the built-in model's tokens
    python -m benchmarks.guided_step --model PATH     # those of another model; weights are not needed

The three take turns in each step, over the same random logits; the median of the steps is told, and the best.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dynamo.engine.native import guided_decoding, sampler
from dynamo.engine.native.sequence import Grammar, Sequence
from dynamo.protocols import blocks, generate
from dynamo.worker import model_source

NUM_STEPS = 100
EOS = (2,)
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "text": TEXT, "tags": {"type": "array", "items": TEXT}},
    "required": ["name", "text", "tags"],
    "additionalProperties": False,
}
HOW = {
    "greedy": generate.SamplingOptions(temperature=0.0),
    "drawn": generate.SamplingOptions(temperature=0.7, top_k=40, top_p=0.9, seed=1),
}


def begin(number: int, grammar: Grammar | None, options: generate.SamplingOptions) -> Sequence:
    request = generate.Request(
        id=str(number),
        model="bench",
        token_ids=blocks.pack([5]),
        sampling_options=options,
        eos_token_ids=EOS,
    )
    return Sequence(request=request, index=0, token_ids=[5], prompt_len=1, grammar=grammar)


def step(draw: sampler.Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> float:
    """Microseconds of CPU time."""
    began_at = time.process_time()
    drawn = draw.sample(logits, sequences)
    spent_s = time.process_time() - began_at
    for sequence, one in zip(sequences, drawn, strict=True):
        sequence.token_ids.append(one.token_id)
    return spent_s * 1e6


def measure(
    vocab_size: int, grammar: Grammar, batch: int, options: generate.SamplingOptions
) -> str:
    num_guided = {"none": 0, "one": 1, "all": batch}
    runs = {
        name: (
            sampler.Sampler(),
            [begin(i, grammar if i < num else None, options) for i in range(batch)],
        )
        for name, num in num_guided.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_STEPS):
        logits = torch.randn(batch, vocab_size) * 3
        for name, (draw, sequences) in runs.items():
            spent[name].append(step(draw, logits, sequences))
    told = [
        f"{name} {statistics.median(times):6.0f} ({min(times):.0f})"
        for name, times in spent.items()
    ]
    return "   ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_source.built_in())
    model = parser.parse_args().model
    torch.set_num_threads(1)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    builder = guided_decoding.GrammarBuilder(model / "tokenizer.json", vocab_size, EOS)
    grammar = builder.build(generate.GuidedDecoding(json=json.dumps(SCHEMA)))
    print(f"{vocab_size} tokens; µs of CPU time per step, median (best), by how many are guided")
    for name, options in HOW.items():
        for batch in (1, 8, 32):
            print(f"{name:7} batch {batch:2}   {measure(vocab_size, grammar, batch, options)}")


if __name__ == "__main__":
    main()
