"""How fast the native embedder is beside transformers, and whether both say the same.

    python -m benchmarks.embedding --model PATH     # an encoder's directory

Milliseconds of CPU per text, one thread, interleaved: best and median of several rounds. transformers gets each batch
as sentence-transformers gives it: padded to its longest text, with a mask.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from dynamo.engine import api
from dynamo.engine.native.embedder import TextEmbedding
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, encoders

ROUNDS = 7
CELLS = {  # number of texts, shortest, longest
    "one short query": (1, 16, 16),
    "32 short texts": (32, 8, 24),
    "64 texts of 64 tokens": (64, 64, 64),
    "64 texts of mixed length": (64, 16, 256),
}
Texts = Sequence[Sequence[int]]


def run_ours(model: TextEmbedding, texts: Texts) -> torch.Tensor:
    packed = model.embed([api.EmbedInput(blocks.pack(text)) for text in texts])
    return torch.tensor([encoders.unpack(one) for one in packed])


def run_transformers(model: torch.nn.Module, texts: Texts) -> torch.Tensor:
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        sums = (states * mask.unsqueeze(2)).sum(1)
    return F.normalize(sums / mask.sum(1, keepdim=True), dim=-1)


def cpu_ms(run: Callable[[], torch.Tensor]) -> float:
    began_at = time.process_time()
    run()
    return (time.process_time() - began_at) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    path = parser.parse_args().model
    ours = TextEmbedding(path, NativeConfig(threads=1))
    theirs = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    draw = random.Random(0)
    for name, (number, shortest, longest) in CELLS.items():
        sizes = [draw.randint(shortest, longest) for _ in range(number)]
        texts = [
            [draw.randrange(1000, ours.facts.vocab_size or 2000) for _ in range(n)] for n in sizes
        ]
        difference = (run_ours(ours, texts) - run_transformers(theirs, texts)).abs().max().item()
        times: dict[str, list[float]] = {"ours": [], "transformers": []}
        for _ in range(ROUNDS):
            times["ours"].append(cpu_ms(lambda texts=texts: run_ours(ours, texts)))
            times["transformers"].append(
                cpu_ms(lambda texts=texts: run_transformers(theirs, texts))
            )
        for system, found in times.items():
            per_text = sorted(one / number for one in found)
            median, best = per_text[len(per_text) // 2], per_text[0]
            print(f"{name}: {system} {median:.2f} ms, best {best:.2f}")
        print(f"{name}: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
