"""The figures of the semantic cache over our own rephrasings."""

import numpy as np
import pytest
from training.semantic import evaluate_cache

from dynamo.protocols import encoders


def test_the_cache_joins_the_pairs_that_the_documentation_counts():
    rephrasings = evaluate_cache.read_pairs("rephrasings")
    near_misses = evaluate_cache.read_pairs("near_misses")

    assert (evaluate_cache.count_joined(rephrasings), len(rephrasings)) == (167, 180)
    assert (evaluate_cache.count_joined(near_misses), len(near_misses)) == (1, 130)


def test_cosines_are_those_of_neighbours():
    class Model:
        def embed(self, texts, max_batch_tokens):
            for text in texts:
                vector = np.array((1.0, 0.0) if text == "a" else (0.6, 0.8), "<f4")
                yield encoders.TextLabels(vector=vector.tobytes())

    cosines = evaluate_cache.measure_cosines(Model(), [("a", "a"), ("a", "b")])

    assert cosines == pytest.approx([1.0, 0.6])
