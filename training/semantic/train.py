"""Train the fast classifiers: `python -m training.semantic.train --texts DIRECTORY` (some ten minutes of two cores).

The domain classifier is fitted to whole questions, that of attacks to windows of texts, because it will read windows.
"""

import argparse
import functools
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo.semantic.classifiers import attacks, profile, words
from training.semantic import entities, linear, requests, texts

ATTACK_SETTINGS = linear.FitSettings(
    max_entries=60_000,
    ngram_buckets=2**16,
    ngram_weight=1.0,
    penalty=3e-5,
    steps=80,
    hidden_width=12,
)
DOMAIN_SETTINGS = linear.FitSettings(
    max_entries=80_000, ngram_buckets=2**18, ngram_weight=1.5, penalty=5e-6
)
KIND_BY_LABEL = {
    "benign": "benign",
    "jailbreak": "attack",
    "injection": "attack",
    "application": "application",
}
WEIGHT_BY_KIND = {"benign": 1.0, "attack": 2.0, "application": 1.0}  # there are few attacks
PERSONA_WEIGHT = 3.0  # and few personas
MOST_SMALL, SMALL_WEIGHT = 4, 0.5  # small windows of one long text beside its large ones
SEED = 20
FRAGMENTS, LEAST_WORDS, MOST_WORDS = 3, 5, 16
FRAGMENT_WEIGHT = 0.25
PLAIN_WEIGHT = 6.0  # of a plainly worded question beside one of an exam: there are few
TERM_WEIGHT, FRAMES_OF_TERM = 0.6, 4
FRAMES = (  # how people ask of a term
    "{}",
    "What is {}?",
    "What does {} mean?",
    "Explain {} to me",
    "How does {} work?",
    "Tell me about {}",
    "I have a question about {}",
    "Why is {} important?",
    "Can you help me with {}?",
    "Give me an example of {}",
    "What causes {}?",
    "Who or what was {}?",
    "How do I {}?",
    "What is the difference between {} and the rest?",
)
MADE_SOURCES = (
    "frames",
    "everyday",
    "sprinkled",
    "spelled",
    "programs",
)  # no threshold is set by them
FALSE_ALARMS = (0.009, 0.001)  # among public harmless texts, by the windows of each size alone
LEFT_OUT = ("harmful", "indirect")  # what words cannot tell from harmless texts
OUT = profile.WEIGHTS


def main() -> None:
    """Train the models and write them where the package reads them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, default=Path("../shared/data/text"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--names", type=Path, help="directory with the lists of the package `names`"
    )
    parser.add_argument("--only", choices=("domain", "attacks", "entities"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=UserWarning, module="training")
    for name, train in (
        ("domain", train_domain),
        ("attacks", train_attacks),
        ("entities", functools.partial(train_entities, names=arguments.names)),
    ):
        if arguments.only in (None, name):
            start = time.process_time()
            train(arguments.texts, arguments.out)
            print(f"{name}: {time.process_time() - start:.0f} CPU-seconds")


def train_domain(source: Path, out: Path) -> None:
    """Fit the 14 categories of MMLU-Pro."""
    exam, (plain, _) = texts.read(source, "domain_train"), texts.read_plain_questions()
    classes = sorted({row["category"] for row in exam})
    samples, labels, weights = [], [], []
    draw = random.Random(SEED)
    for rows, weight in ((exam, 1.0), (plain, PLAIN_WEIGHT)):
        for row, tokens in zip(rows, _tokens(rows), strict=True):
            fragments = _draw_fragments(tokens, draw) if rows is exam else []
            samples += [tokens, *fragments]
            labels += [classes.index(row["category"])] * (1 + len(fragments))
            weights += [weight] + [FRAGMENT_WEIGHT] * len(fragments)
    for row in texts.read_topic_terms():
        for frame in draw.sample(FRAMES, FRAMES_OF_TERM):
            samples.append(words.tokenize(frame.format(row["text"])).words)
            labels.append(classes.index(row["category"]))
            weights.append(TERM_WEIGHT)
    fitted = linear.fit(samples, np.array(labels), len(classes), DOMAIN_SETTINGS, np.array(weights))
    linear.write(fitted, classes, out / "domain.npz")


def _draw_fragments(tokens: linear.Tokens, draw: random.Random) -> list[linear.Tokens]:
    """Return short pieces of a long question: people ask in few words, exams do not."""
    fragments = []
    for _ in range(FRAGMENTS if len(tokens) > MOST_WORDS else 0):
        size = draw.randint(LEAST_WORDS, MOST_WORDS)
        start = draw.randrange(len(tokens) - size)
        fragments.append(tokens[start : start + size])
    return fragments


def train_attacks(source: Path, out: Path) -> None:
    """Fit attacks against harmless texts, by windows, and the offsets that make windows of all sizes comparable."""
    rows = [
        row
        for row in texts.read(source, "jailbreak_train")
        if row["label"] != "harmful" and row["family"] not in LEFT_OUT
    ]
    rows += requests.make_requests(rows)
    path = out / "attacks.npz"
    _fit_windows([row for row in rows if not texts.is_held_out(row["cluster"])], path)
    offsets = _calibrate([row for row in rows if texts.is_held_out(row["cluster"])], path)
    _fit_windows(rows, path)
    with np.load(path) as stored:
        np.savez_compressed(path, **stored, offsets=offsets)


def _fit_windows(rows: Sequence[texts.Row], path: Path) -> None:
    samples, labels, weights = [], [], []
    draw = random.Random(SEED)
    for row, tokens in zip(rows, _tokens(rows), strict=True):
        kind = KIND_BY_LABEL[row["label"]]
        is_persona = row["family"] == "persona"
        weight = PERSONA_WEIGHT if is_persona else WEIGHT_BY_KIND[kind]
        large, small = (
            list(zip(*words.window_bounds(max(1, len(tokens)), (size,)), strict=True))
            for size in attacks.WINDOW_SIZES
        )
        small = draw.sample(small, min(MOST_SMALL, len(small))) if len(small) > 1 else []
        for windows, share in ((large, 1.0), (small, SMALL_WEIGHT)):
            for start, end in windows:
                samples.append(tokens[start:end])
                labels.append(attacks.KINDS.index(kind))
                weights.append(weight * share / len(windows) ** 0.7)
    fitted = linear.fit(
        samples, np.array(labels), len(attacks.KINDS), ATTACK_SETTINGS, np.array(weights)
    )
    linear.write(fitted, attacks.KINDS, path)


def _calibrate(rows: Sequence[texts.Row], path: Path) -> np.ndarray:
    """Return for each window size what to subtract, so that few harmless texts pass the usual threshold."""
    model = words.WordModel(path)
    harmless = [
        row for row in rows if row["label"] == "benign" and row["source"] not in MADE_SOURCES
    ]
    offsets = []
    for size, share in zip(attacks.WINDOW_SIZES, FALSE_ALARMS, strict=True):
        margins = []
        for tokens in _tokens(harmless):
            rows_of_text = model.token_rows(words.TokenizedText(list(tokens)))
            logits = model.window_logits(rows_of_text, (size,))
            margins.append(float((logits[:, 1] - logits[:, 0]).max()))
        offsets.append(np.quantile(margins, 1 - share) - attacks.USUAL_MARGIN)
    print("offsets", offsets, "from", len(harmless))
    return np.array(offsets, np.float32)


def train_entities(source: Path, out: Path, names: Path | None) -> None:
    """Fit the tagger of names and addresses, where the lists of the package `names` are given."""
    if names is None:
        print("entities: no --names, the directory with dist.all.last; the shipped tagger stays")
    else:
        entities.train(source, names, out)


def _tokens(rows: Sequence[texts.Row]) -> list[linear.Tokens]:
    return [words.tokenize(row["text"]).words for row in rows]


if __name__ == "__main__":
    main()
