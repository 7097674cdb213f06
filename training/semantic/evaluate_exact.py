"""Measure the exact profile on texts that it was never trained on: `python -m training.semantic.evaluate_exact`.

The tables are those of `evaluate`, by the shipped adapters on a MiniLM and the word models together.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dynamo.engine.native import settings
from dynamo.protocols import encoders
from dynamo.semantic import encoder_labels, encoder_scores
from dynamo.semantic.classifiers import attacks, pii, profile
from dynamo.worker import classifier_set
from training.semantic import evaluate, texts

SETS = ("domain_dev", "jailbreak_dev", "plain_chat_dev", "pii_dev")
_AT_ONCE = 256


class ExactProfile:
    """The exact profile in this process, in the form of the fast one; what it has read once it keeps."""

    def __init__(self, base: str) -> None:
        self._fast = profile.load_profile()
        exact = classifier_set.load_exact(base, Path(), settings.NativeConfig(threads=1))
        self._classifiers = classifier_set.ClassifierSet(
            [exact], max_batch_tokens=4096, max_text_tokens=16_384
        )
        self._answers: dict[tuple[str, str], encoders.TextLabels] = {}
        self._scores = encoder_scores.EncoderScores(self._fast, {}, self._answers, profile.OTHER)
        self.categories = self._fast.categories

    def read(self, rows: Sequence[str]) -> None:
        """Let the encoder read texts, short ones together."""
        ordered = sorted(set(rows), key=len)
        for start in range(0, len(ordered), _AT_ONCE):
            batch = ordered[start : start + _AT_ONCE]
            by_classifier = dict.fromkeys(encoder_labels.EXACT, batch)
            inputs = encoder_scores.list_inputs({}, "exact", self._fast, by_classifier)
            results = self._classifiers.classify(inputs)
            for one, result in zip(inputs, results, strict=True):
                self._answers[one.classifier, one.text] = result

    def classify_domain(self, text: str) -> profile.DomainScore:
        """Return the category of a text."""
        return self._scores.classify_domain(text)

    def classify_attack(self, text: str) -> attacks.AttackScore:
        """Return the risk of a text."""
        return self._scores.classify_attack(text)

    def find_pii(self, text: str) -> tuple[list[pii.PiiSpan], bool]:
        """Return the personal data in a text."""
        return self._scores.find_pii(text)


def main() -> None:
    """Print the tables, and the cost of one pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--every", type=int, default=1, help="2: every second text of each set")
    parser.add_argument("--texts", type=Path, default=Path("../shared/data/text"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    read = texts.read
    texts.read = lambda source, name: read(source, name)[:: arguments.every]  # type: ignore[assignment]
    exact = ExactProfile(arguments.base)
    show_cost(exact, arguments.texts)
    for name in SETS:  # the development sets
        exact.read([row["text"] for row in texts.read(arguments.texts, name)])
        print(f"{name} is read", file=sys.stderr)
    exact.read([row["text"] for row in texts.read_plain_questions()[1]])
    evaluate.FAST = exact  # type: ignore[assignment]
    evaluate.show_domain(arguments.texts)
    evaluate.show_attacks(arguments.texts)
    evaluate.show_pii(arguments.texts)


def show_cost(exact: ExactProfile, source: Path) -> None:
    """Print the CPU time of one pass for domain, attacks and names, at 128 and at 512 tokens."""
    joined = "\n".join(row["text"] for row in texts.read(source, "plain_chat_dev"))
    for num_tokens, characters in ((128, 575), (512, 2300)):
        pieces = [joined[n * characters : (n + 1) * characters] for n in range(12)]
        exact.read(pieces[:2])
        start = time.process_time()
        for piece in pieces[2:]:
            exact.read([piece])
        seconds = (time.process_time() - start) / len(pieces[2:])
        print(f"cost, some {num_tokens} tokens: {seconds * 1000:.1f} CPU-ms")


if __name__ == "__main__":
    main()
