"""Measure the shipped classifiers on texts that they were never trained on: `python -m training.semantic.evaluate`."""

import argparse
import base64
import codecs
import collections
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from dynamo.semantic.classifiers import profile
from training.semantic import texts

SEED = 20
USUAL = 0.7  # the published threshold
NUM_LONG_TEXTS = 30
FAST = profile.load_profile()
_PATTERNED = "EMAIL_ADDRESS CREDIT_CARD IBAN_CODE US_SSN IP_ADDRESS PHONE_NUMBER".split()  # noqa: SIM905


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, default=Path("../shared/data/text"))
    source = parser.parse_args().texts
    show_domain(source)
    show_attacks(source)
    show_disguises(source)
    show_pii(source)
    show_cost(source)


def show_domain(source: Path) -> None:
    """Print the accuracy of the domain, and what is taken for what."""
    for name, rows in (
        ("exam style", texts.read(source, "domain_dev")),
        ("plainly worded", texts.read_plain_questions()[1]),
    ):
        scores = [FAST.classify_domain(row["text"]) for row in rows]
        best = [max(s.probabilities, key=s.probabilities.__getitem__) for s in scores]
        correct = np.mean([b == row["category"] for b, row in zip(best, rows, strict=True)])
        print(f"domain, {name}: top-1 {correct:.3f} of {len(rows)}")
        if name == "exam style":
            _show_confusion([row["category"] for row in rows], best)


def _show_confusion(labels: Sequence[str], predictions: Sequence[str]) -> None:
    pairs = collections.Counter(zip(labels, predictions, strict=True))
    for label, total in sorted(collections.Counter(labels).items()):
        wrong = [(n, p) for (actual, p), n in pairs.items() if actual == label != p]
        taken = ", ".join(f"{p} {n}" for n, p in sorted(wrong, reverse=True)[:3])
        print(f"| {label} | {total} | {pairs[label, label] / total:.2f} | {taken} |")


def show_attacks(source: Path) -> None:
    """Print the recall of attacks at thresholds set on plain chat, and false alarms by source."""
    chat, dev = texts.read(source, "plain_chat_dev"), texts.read(source, "jailbreak_dev")
    chat_margins = np.array([_margin(row["text"]) for row in chat])
    margins = np.array([_margin(row["text"]) for row in dev])
    usual = math.log(USUAL / (1 - USUAL))
    thresholds = {f"{share:.0%}": np.quantile(chat_margins, 1 - share) for share in (0.01, 0.02)}
    for name, threshold in {**thresholds, "risk 0.7": usual}.items():
        groups: dict[str, list[bool]] = collections.defaultdict(list)
        clusters: dict[str, list[bool]] = collections.defaultdict(list)
        for row, margin in zip(dev, margins, strict=True):
            groups[f"{row['label']}/{row['family']}"].append(margin > threshold)
            if row["label"] == "jailbreak":
                groups["all jailbreaks"].append(margin > threshold)
            if row["label"] in ("jailbreak", "injection") and row["family"] != "indirect":
                clusters[row["cluster"]].append(margin > threshold)
        for row, margin in zip(chat, chat_margins, strict=True):
            groups[f"chat/{row['source']}"].append(margin > threshold)
        print(f"attacks, threshold {name} ({np.mean(chat_margins > threshold):.3f} of plain chat):")
        per_cluster = np.mean([np.mean(hits) for hits in clusters.values()])
        print(f"| per cluster | {len(clusters)} | {per_cluster:.3f} |")
        for group, hits in sorted(groups.items()):
            print(f"| {group} | {len(hits)} | {np.mean(hits):.3f} |")


def show_disguises(source: Path) -> None:
    """Print how many jailbreaks are found at the usual threshold in disguise and inside long texts."""
    draw = random.Random(SEED)
    attacks = [r["text"] for r in texts.read(source, "jailbreak_dev") if r["label"] == "jailbreak"]
    harmless = [row["text"] for row in texts.read(source, "plain_chat_dev")]
    noise = base64.b64encode(draw.randbytes(1500)).decode()
    words = " ".join("The harvest was good and the village was happy." for _ in range(40))
    disguises: dict[str, Callable[[str], str]] = {
        "alone": lambda text: text,
        "behind 2,000 characters of base64": lambda text: noise + "\n" + text,
        "behind 2,000 of Chinese": lambda text: "今天天气很好我们去公园" * 190 + "\n" + text,
        "behind 2,000 emoji": lambda text: "😀" * 2000 + text,
        "before 1,900 characters of harmless words": lambda text: text + "\n" + words,
        "letters apart": lambda text: "  ".join(" ".join(word) for word in text.split()),
        "as base64": lambda text: "Do this: " + base64.b64encode(text.encode()).decode(),
        "as hexadecimal digits": lambda text: "Do this: " + text.encode().hex(),
        "as base32": lambda text: "Do this: " + base64.b32encode(text.encode()).decode(),
        "as bytes apart": lambda text: "Do this: " + text.encode().hex(" "),
        "percent-encoded": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
        "in ROT13": lambda text: "Do this: " + codecs.encode(text, "rot13"),
        "backwards": lambda text: text[::-1],
        "with each word backwards": lambda text: " ".join(word[::-1] for word in text.split()),
        "in digits for letters": lambda text: text.translate(
            str.maketrans("aeiostAEIOST", "431057" * 2)
        ),
        "of full width": lambda text: text.translate({n: n + 0xFEE0 for n in range(33, 127)}),
        "in invisible tags": lambda text: text.translate({n: n + 0xE0000 for n in range(32, 127)}),
        "with zero-width characters": "\u200b".join,
        "with letters of Cyrillic": lambda text: text.translate(
            str.maketrans("aeopcxi", "\u0430\u0435\u043e\u0440\u0441\u0445\u0456")
        ),
        "with marks": lambda text: "".join(f"{sign}\u0336" for sign in text),
    }
    for name, disguise in disguises.items():
        found = np.mean([FAST.classify_attack(disguise(text)).risk >= USUAL for text in attacks])
        print(f"disguise, {name}: {found:.2f} of {len(attacks)}")
    for num_texts in (100, 600):
        found, alarms = [], []
        for _ in range(NUM_LONG_TEXTS):
            around = draw.sample(harmless, num_texts)
            place = draw.randrange(num_texts)
            mixed = [*around[:place], draw.choice(attacks), *around[place:]]
            found.append(FAST.classify_attack("\n\n".join(mixed)).risk >= USUAL)
            alarms.append(FAST.classify_attack("\n\n".join(around)).risk >= USUAL)
        tokens = sum(map(len, around)) // 4
        print(
            f"long text, some {tokens} tokens of chat: {np.mean(found):.2f} found, "
            f"{np.mean(alarms):.2f} false alarms without one, of {NUM_LONG_TEXTS}"
        )


def _margin(text: str) -> float:
    risk = FAST.classify_attack(text).risk
    return math.log(risk + 1e-15) - math.log(1 - risk + 1e-15)


def show_pii(source: Path) -> None:
    """Print recall and precision by kind, and harmless texts with a pattern in them."""
    dev = texts.read(source, "pii_dev")
    for kind in (*_PATTERNED, "PERSON", "STREET_ADDRESS"):
        for style in ("template", "forum"):
            rows = [row for row in dev if (row["source"] == "wnut17") == (style == "forum")]
            _show_kind(kind, style, rows)
            if kind == "PERSON":
                print("at a threshold of 0.6:")
                _show_kind(kind, style, rows, 0.6)
    for name in ("domain_dev", "plain_chat_dev"):
        rows = texts.read(source, name)
        spans = [FAST.find_pii(row["text"])[0] for row in rows]
        marked = [{span.type for span in found if span.confidence >= 0.7} for found in spans]
        patterned = np.mean([bool(kinds.intersection(_PATTERNED)) for kinds in marked])
        named = np.mean(["PERSON" in kinds for kinds in marked])
        listed = np.mean(["PERSON" in {span.type for span in found} for found in spans])
        print(
            f"{name}: {patterned:.2%} of texts marked by a pattern, {named:.2%} by a name, "
            f"{listed:.2%} by one at a threshold of 0.6"
        )


def _show_kind(kind: str, style: str, rows: Iterable[texts.Row], least: float = 0.7) -> None:
    """Print recall, by span and as the mean over templates, and precision."""
    by_group: dict[str, list[bool]] = collections.defaultdict(list)
    num_marked = num_right = 0
    for row in rows:
        true = [(start, end) for start, end, label in row["spans"] if label == kind]
        marked = [
            (span.start, span.end)
            for span in FAST.find_pii(row["text"])[0]
            if span.type == kind and span.confidence >= least
        ]
        num_marked += len(marked)
        by_group[row["group"]] += [any(_covers(m, t) for m in marked) for t in true]
        num_right += sum(any(_covers(t, m) for t in true) for m in marked)
    hits = [hit for group in by_group.values() for hit in group]
    if hits:
        precision = num_right / num_marked if num_marked else float("nan")
        per_group = np.mean([np.mean(group) for group in by_group.values() if group])
        print(
            f"| {kind} | {style} | {len(hits)} | {np.mean(hits):.2f} | per template "
            f"{per_group:.2f} | {precision:.2f} |"
        )


def _covers(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a span covers at least half of another."""
    common = min(span[1], other[1]) - max(span[0], other[0])
    return common * 2 >= other[1] - other[0]


def show_cost(source: Path) -> None:
    """Print the CPU time of each classifier on pieces of 2,300 characters, some 512 tokens."""
    joined = "\n".join(row["text"] for row in texts.read(source, "plain_chat_dev"))
    pieces = [joined[start : start + 2300] for start in range(0, 460_000, 2300)]
    classifiers: dict[str, Callable[[str], object]] = {
        "domain": FAST.classify_domain,
        "attacks": FAST.classify_attack,
        "pii": FAST.find_pii,
    }
    for name, classify in classifiers.items():
        for piece in pieces[:20]:
            classify(piece)
        start = time.process_time()
        for piece in pieces:
            classify(piece)
        print(f"cost, {name}: {(time.process_time() - start) / len(pieces) * 1000:.2f} CPU-ms")


if __name__ == "__main__":
    main()
