"""Asks a trained model the fixed set of checks, greedily, and prints how many it gets right.

python -m training.storyteller.evaluate build/storyteller --json build/evaluation.json
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from training.storyteller.checks import Check, all_checks, list_far_checks
from training.storyteller.corpus import build_corpus
from training.storyteller.grammar.messages import Conversation, Message
from training.storyteller.render import render
from training.storyteller.tokenizer import END_OF_TEXT, TURN_END
from training.storyteller.train import validation_loss

BATCH = 16
SAMPLE_TURNS = (
    ("Tell me a story about a brave cat", "What was the cat called?", "What did we learn?"),
    ("tell me a story about a cowardly cat",),
    ("My name is Nora.", "What is the capital of Norway?", "What is 17 + 25?", "What is my name?"),
    ("Write a poem about the moon.", "Who won the football match yesterday?"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers among all of a group."""

    right: int
    total: int


class Answerer:
    """Greedy answers in batches, by transformers."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        end, padding = (self.tokenizer.token_to_id(text) for text in (TURN_END, END_OF_TEXT))
        self._padding = padding
        self._options = {
            "eos_token_id": [end, padding],
            "pad_token_id": padding,
            "do_sample": False,
        }

    def answer(self, prompts: list[Conversation], num_tokens: int) -> list[str]:
        rows = [
            self.tokenizer.encode(render(each, add_generation_prompt=True)).ids for each in prompts
        ]
        width = max(len(row) for row in rows)
        ids = torch.tensor([[self._padding] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        options = GenerationConfig(max_new_tokens=num_tokens, **self._options)
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=mask, generation_config=options)
        return [self.tokenizer.decode(row[width:].tolist()) for row in out]


def evaluate(answerer: Answerer, texts: Path | None) -> dict[str, Score]:
    """Ask everything and count by group; with `texts`, some questions of public sets as well."""
    checks = all_checks() + (list_far_checks(texts) if texts else [])
    verdicts: dict[str, list[bool]] = {
        group: [] for check in checks for group in check.judge_by_group
    }
    for batch in _batches(checks):
        answers = answerer.answer([check.prompt for check in batch], batch[0].num_tokens)
        for check, answer in zip(batch, answers, strict=True):
            for group, judge in check.judge_by_group.items():
                verdicts[group].append(judge(answer))
    return {group: Score(sum(each), len(each)) for group, each in verdicts.items()}


def _batches(checks: list[Check]) -> Iterator[list[Check]]:
    """Batches of one answer length, prompts of like length together."""
    by_length: dict[int, list[Check]] = defaultdict(list)
    for check in checks:
        by_length[check.num_tokens].append(check)
    for group in by_length.values():
        group.sort(key=lambda check: len(render(check.prompt)))
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


def converse(answerer: Answerer, turns: tuple[str, ...]) -> list[Message]:
    """A conversation with the model, a turn at a time."""
    messages: list[Message] = []
    for turn in turns:
        messages.append(Message("user", turn))
        (answer,) = answerer.answer([Conversation(tuple(messages))], 400)
        messages.append(Message("assistant", answer.strip()))
    return messages


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.storyteller.evaluate", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--json", type=Path, help="file to write the scores to")
    parser.add_argument("--texts", type=Path, help="folder of public texts, for more to refuse")
    parser.add_argument("--samples", action="store_true", help="print some conversations too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    answerer, started = Answerer(options.model), time.process_time()
    scores = evaluate(answerer, options.texts)
    loss = validation_loss(answerer.model, build_corpus(answerer.tokenizer, "validation", 300))
    for group, score in scores.items():
        print(f"{group:34} {score.right:3} of {score.total:3}  {score.right / score.total:5.0%}")
    print(f"{'validation loss':34} {loss:.4f}")
    print(f"{'CPU seconds':34} {time.process_time() - started:.0f}")
    if options.samples:
        _print_samples(answerer)
    if options.json:
        result = {group: [score.right, score.total] for group, score in scores.items()}
        options.json.write_text(
            json.dumps({"loss": round(loss, 4), "scores": result}, indent=2) + "\n"
        )


def _print_samples(answerer: Answerer) -> None:
    for turns in SAMPLE_TURNS:
        print("\n---")
        for message in converse(answerer, turns):
            print(f"{message.role}: {message.content}")


if __name__ == "__main__":
    main(sys.argv[1:])
