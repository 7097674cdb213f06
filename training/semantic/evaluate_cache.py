"""Measure which questions the semantic cache takes for the same: `python -m training.semantic.evaluate_cache`.

Near misses are pairs that it must not join, rephrasings pairs that it may. Of each file of our own the first part was
in sight when the rules were written, the rest was written after them. With `--model`, the same by the cosine of
an embedding model's vectors alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo.engine.native import settings
from dynamo.semantic import cache, question_meaning
from dynamo.worker import classifier_set
from training.semantic import texts

THRESHOLDS = (0.8, 0.9, 0.95)
WORD_THRESHOLDS = (0.0, 0.7, 0.8, 0.9, 0.95, 1.0)
NUM_IN_SIGHT = {"rephrasings": 140, "near_misses": 90}
_MAX_TOKENS = 4096
Pair = tuple[str, str]


def read_pairs(name: str) -> list[Pair]:
    """Return our own pairs of questions: `rephrasings` with the same meaning, `near_misses` with another."""
    path = Path(__file__).parent / f"{name}.txt"
    pairs = (line.split("\t") for line in path.read_text().splitlines())
    return [(first, second) for first, second in pairs]


def count_joined(pairs: Sequence[Pair], threshold: float = 0.8) -> int:
    """Return how many pairs the cache takes for the same question."""
    return sum(score_pair(pair) >= threshold for pair in pairs)


def score_pair(pair: Pair) -> float:
    """Return the similarity of two questions of one meaning, -1 for those of two."""
    first, second = map(question_meaning.read_meaning, pair)
    if first.key != second.key or not first.agrees_with(second):
        return -1.0
    return cache.similarity(first.weights, second.weights)


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
    sets = {
        "near misses": [(row["a"], row["b"]) for row in texts.read(options.texts, "near_miss_dev")]
    }
    for name, num_in_sight in NUM_IN_SIGHT.items():
        pairs = read_pairs(name)
        sets |= {f"{name} in sight": pairs[:num_in_sight], f"{name} after": pairs[num_in_sight:]}
    for name, pairs in sets.items():
        joined_by = ", ".join(f"{count_joined(pairs, t)} at {t:g}" for t in WORD_THRESHOLDS)
        print(f"{name}: of {len(pairs)} are joined by words: {joined_by}")
        if options.model is not None:
            native = settings.NativeConfig(threads=1)
            cosines = measure_cosines(classifier_set.load_embedder(options.model, native), pairs)
            for threshold in THRESHOLDS:
                joined = sum(cosine >= threshold for cosine in cosines)
                print(f"  by embeddings alone at {threshold}: {joined}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
