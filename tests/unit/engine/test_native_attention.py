"""Attention over the paged cache, against plain attention over whole sequences."""

import random

import pytest
import torch

from dynamo.engine.native import attention, config
from dynamo.engine.native.sequence import Chunk, Sequence
from dynamo.protocols import blocks, generate

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 6, 2, 16, 8
SHAPE = config.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": HEADS * DIM,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
    }
)


class Story:
    """A sequence with random queries, keys and values, in blocks strewn over the cache."""

    def __init__(self, length, block_ids):
        generator = torch.Generator().manual_seed(length)
        self.q = torch.randn(length, HEADS, DIM, generator=generator)
        self.kv = torch.randn(length, 2 * KV_HEADS, DIM, generator=generator)
        request = generate.Request(id="r", model="m", token_ids=blocks.pack([0] * length))
        self.sequence = Sequence(
            request=request,
            index=0,
            token_ids=[0] * length,
            prompt_len=length,
            block_ids=block_ids,
        )

    def expected(self):
        """[length, heads * head_dim]"""
        keys, values = self.kv.repeat_interleave(HEADS // KV_HEADS, 1).chunk(2, 1)
        scores = torch.einsum("qhd,khd->hqk", self.q, keys) / DIM**0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def make_cache(num_blocks=600):
    cache = attention.KvCache(
        SHAPE, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu"
    )
    everything = torch.full((num_blocks * BLOCK_SIZE, 2 * KV_HEADS, DIM), 1e4)
    cache.write(0, torch.arange(num_blocks * BLOCK_SIZE), everything)  # left by others
    return cache


def make_stories(*lengths):
    strewn = list(range(600))
    random.Random(0).shuffle(strewn)
    stories = []
    for length in lengths:
        num_blocks = -(-length // BLOCK_SIZE)
        stories.append(Story(length, [strewn.pop() for _ in range(num_blocks)]))
    return stories


def attend(cache, parts):
    """What a batch of (story, start, number of tokens) gives for each of them."""
    chunks = [
        Chunk(sequence=story.sequence, start=start, num_tokens=count, samples=False)
        for story, start, count in parts
    ]
    batch = attention.PagedBatch(cache, chunks)
    rows = len(batch.positions)
    q, kv = torch.zeros(rows, HEADS, DIM), torch.zeros(rows, 2 * KV_HEADS, DIM)
    ends = [row + 1 for row in batch.last_rows]
    for (story, start, count), end in zip(parts, ends, strict=True):
        q[end - count : end] = story.q[start : start + count]
        kv[end - count : end] = story.kv[start : start + count]
    out = batch.attend(0, q, kv)
    return [out[end - count : end].clone() for (_, _, count), end in zip(parts, ends, strict=True)]


def test_a_key_span_covers_its_position_and_at_most_a_quarter_more():
    for position in range(5000):
        span = attention.key_span(position)

        assert position < span <= (position + 1) * 1.25 + 64
        assert span == attention.key_span(span - 1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300, 700])
def test_a_whole_prompt_attends_as_plain_attention(length):
    (story,) = make_stories(length)

    (found,) = attend(make_cache(), [(story, 0, length)])
    torch.testing.assert_close(found, story.expected(), rtol=1e-4, atol=1e-5)


def test_chunks_and_single_tokens_attend_as_the_whole_prompt_does():
    (story,) = make_stories(330)
    (whole,) = attend(make_cache(), [(story, 0, 330)])
    cache, start = make_cache(), 0
    for count in (1, 5, 59, 1, 1, 2, 100, 63, 1, 97):
        (part,) = attend(cache, [(story, start, count)])

        torch.testing.assert_close(part, whole[start : start + count], rtol=1e-5, atol=1e-6)
        start += count

    assert start == 330


def test_sequences_do_not_see_each_other():
    stories = make_stories(40, 64, 200, 333, 70, 12)
    cache = make_cache()
    firsts = [30, 63, 199, 100, 1, 0]
    attend(cache, [(s, 0, n) for s, n in zip(stories, firsts, strict=True) if n])
    counts = [1, 1, 1, 233, 69, 12]

    found = attend(cache, list(zip(stories, firsts, counts, strict=True)))
    for story, first, count, part in zip(stories, firsts, counts, found, strict=True):
        expected = story.expected()[first : first + count]
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)


def test_many_single_tokens_are_staged_in_several_parts(monkeypatch):
    monkeypatch.setattr(attention, "STAGED_TOKENS", 128)
    stories = make_stories(*range(50, 60))
    cache = make_cache()
    attend(cache, [(story, 0, len(story.q) - 1) for story in stories])

    found = attend(cache, [(story, len(story.q) - 1, 1) for story in stories])
    for story, part in zip(stories, found, strict=True):
        torch.testing.assert_close(part, story.expected()[-1:], rtol=1e-4, atol=1e-5)
