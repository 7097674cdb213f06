"""Traces to simulate with: one that is made up, and the recorded one where it is at hand."""

import functools
import pathlib
import random

import pytest

from dynamo.simulate.workload import TRACE_BLOCK_SIZE, SimulatedRequest, Trace, read_trace

RECORDED = (
    pathlib.Path(__file__).parents[4] / "shared/data/traces/mooncake_conversation_trace.jsonl"
)


@functools.cache
def conversations(num_requests):
    """Conversations of several turns that all begin with block 0."""
    rng, fresh, open_, arrivals = random.Random(7), iter(range(1, 10**9)), [], []
    for i in range(num_requests):
        if not open_ or rng.random() < 0.4:
            open_.append([0])
        history = rng.choice(open_[-40:])
        history += [next(fresh) for _ in range(rng.randrange(2, 20))]
        size = TRACE_BLOCK_SIZE * len(history)
        arrivals.append(
            SimulatedRequest(at=0.3 * i, num_tokens=size, num_output=10, names=tuple(history))
        )
    return Trace(arrivals)


@functools.cache
def recorded(limit=None):
    """Mooncake's conversation trace."""
    if not RECORDED.exists():
        pytest.skip(
            f"no ../shared/data/traces/{RECORDED.name}, Mooncake's public trace (github.com/kvcache-ai/Mooncake)"
        )
    return read_trace(RECORDED, limit=limit)
