"""Turns the grammar's conversations into one long row of tokens with a weight for each.

The weight is the chance that a token counts in the loss of a step. What the model has to say always
counts; what users and tools say seldom does, because a server never lets the model say it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training.storyteller.far_questions import add_far_questions
from training.storyteller.grammar.conversation import draw_conversation
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Conversation
from training.storyteller.render import render
from training.storyteller.tokenizer import END_OF_TEXT, TURN_END, TURN_START

QUIET_WEIGHT = 0.1
_CHUNK = 2000


@dataclass(frozen=True, slots=True)
class Corpus:
    """All tokens, their weights, and where each conversation starts."""

    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def draw_windows(
        self, random: np.random.Generator, num_rows: int, length: int, share_at_start: float = 0.6
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw windows of `length + 1` tokens, many of them where a conversation starts."""
        latest = self.num_tokens - length - 1
        begins = np.where(
            random.random(num_rows) < share_at_start,
            random.choice(self.starts, num_rows),
            random.integers(0, latest, num_rows),
        )
        index = np.minimum(begins, latest)[:, None] + np.arange(length + 1)
        return self.tokens[index], self.weights[index]


def draw_conversations(seed: str, count: int) -> Iterator[Conversation]:
    """The conversations of a seed; each has a seed of its own, so any of them can be drawn alone."""
    for number in range(count):
        yield draw_conversation(Dice(f"{seed}/{number}"))


def build_corpus(
    tokenizer: Tokenizer, seed: str, count: int, far_questions: list[str] | None = None
) -> Corpus:
    """Draw, render, tokenize and weigh `count` conversations, and the far questions among them."""
    tokens: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    conversations = draw_conversations(seed, count)
    if far_questions:
        conversations = add_far_questions(conversations, far_questions, seed)
    for chunk in _chunks(conversations):
        encodings = tokenizer.encode_batch([render(conversation) for conversation in chunk])
        for conversation, encoding in zip(chunk, encodings, strict=True):
            row = np.array([*encoding.ids, tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
            tokens.append(row)
            weights.append(_weigh(tokenizer, row, conversation))
    lengths = [len(row) for row in tokens]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Corpus(np.concatenate(tokens), np.concatenate(weights), starts)


def _chunks(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    chunk: list[Conversation] = []
    for conversation in conversations:
        chunk.append(conversation)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _weigh(tokenizer: Tokenizer, row: np.ndarray, conversation: Conversation) -> np.ndarray:
    if conversation.text:
        return np.ones(len(row), dtype=np.float32)
    weights = np.full(len(row), QUIET_WEIGHT, dtype=np.float32)
    spans = _assistant_spans(tokenizer, row)
    # The template drops earlier thoughts, so only the last answer shows how to think.
    for begin, end in spans[-1:] if conversation.enable_thinking else spans:
        weights[begin:end] = 1.0
    return weights


def _assistant_spans(tokenizer: Tokenizer, row: np.ndarray) -> list[tuple[int, int]]:
    """Where the assistant speaks: after its header, up to and with the end of its turn."""
    header = tokenizer.encode(f"{TURN_START}assistant\n").ids
    ends = np.flatnonzero(row == tokenizer.token_to_id(TURN_END))
    spans = []
    for begin in np.flatnonzero(row == header[0]):
        if list(row[begin : begin + len(header)]) == header:
            end = ends[np.searchsorted(ends, begin)]
            spans.append((int(begin) + len(header), int(end) + 1))
    return spans
