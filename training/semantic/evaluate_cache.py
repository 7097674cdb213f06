"""Measure which questions the semantic cache takes for the same: `python -m training.semantic.evaluate_cache`.

Near misses are pairs that it must not join, rephrasings pairs that it may. With `--model`, the same by the cosine of
an embedding model's vectors alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo.engine.native import settings
from dynamo.semantic import cache
from dynamo.worker import classifier_set
from training.semantic import texts

THRESHOLDS = (0.8, 0.9, 0.95)
_MAX_TOKENS = 4096
Pair = tuple[str, str]


def read_rephrasings() -> list[Pair]:
    """Return our own pairs of questions with the same meaning."""
    path = Path(__file__).parent / "rephrasings.txt"
    pairs = (line.split("\t") for line in path.read_text().splitlines())
    return [(first, second) for first, second in pairs]


def count_joined(pairs: Sequence[Pair]) -> int:
    """Return how many pairs the cache takes for the same question."""
    words = cache.meaningful_words
    return sum(words(first) == words(second) for first, second in pairs)


def measure_cosines(model: classifier_set.LoadedEmbedder, pairs: Sequence[Pair]) -> list[float]:
    """Return the cosine of each pair."""
    rows = model.embed([text for pair in pairs for text in pair], _MAX_TOKENS)
    vectors = [np.frombuffer(row.vector, "<f4") for row in rows]
    return [float(a @ b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="directory of near_miss_dev")
    parser.add_argument("--model", type=Path, help="directory of an embedding model")
    options = parser.parse_args()
    near = [(row["a"], row["b"]) for row in texts.read(options.texts, "near_miss_dev")]
    sets = {"near misses": near, "rephrasings": read_rephrasings()}
    for name, pairs in sets.items():
        print(f"{name}: {count_joined(pairs)} of {len(pairs)} joined by words")
        if options.model is not None:
            native = settings.NativeConfig(threads=1)
            cosines = measure_cosines(classifier_set.load_embedder(options.model, native), pairs)
            for threshold in THRESHOLDS:
                joined = sum(cosine >= threshold for cosine in cosines)
                print(f"  by embeddings alone at {threshold}: {joined}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
