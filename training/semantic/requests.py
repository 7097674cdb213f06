"""Requests made for training the classifier of attacks: from frames, and around pieces of programs.

The public texts have few long requests, few system prompts, and next to no programs, so a classifier that knows only
them takes a program for an attack. Programs come from the library of Python and from packages of the development
extra with licences that permit it (BSD, Apache), in the versions of `constraints.txt`.
"""

import collections
import importlib.util
import math
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dynamo.semantic.classifiers import words
from training.semantic import texts

SEED = 20
NUM_ATTACKS, NUM_HARMLESS, NUM_PROGRAMS, NUM_SPRINKLED = 1200, 3300, 1100, 5000
NUM_APPLICATIONS, NUM_SPELLED, NUM_EVERYDAY = 2200, 600, 1200
NUM_TYPICAL = 500  # words that attacks have and harmless texts have not
_FRAMES = Path(__file__).with_name("request_frames.txt")
_SLOT = re.compile(r"\{(\w+)\}")
_SOURCES = (  # package (empty: Python's library), pattern, share of the pieces
    ("", "*.py", 0.25),
    ("", "**/*.py", 0.15),
    ("numpy", "**/*.h", 0.1),
    ("numpy", "**/*.py", 0.1),
    ("torch", "include/ATen/*.h", 0.1),
    ("torch", "include/c10/**/*.h", 0.1),
    ("playwright", "**/*.js", 0.15),
    ("playwright", "**/*.html", 0.05),
)
_ASK = (
    "Explain this code",
    "Fix the bug in the following:",
    "What does this do?",
    "Remove dead code from this",
    "Write tests for this function.",
    "Why do I get an error here?",
    "Make it faster and easier to read:",
    "Convert this to another language:",
    "How can I change this so that it also handles empty input?",
    "Is this code secure? Suggest improvements.",
    "",
)
_LEET = str.maketrans("aeiostAEIOST", "431057" * 2)
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    lambda text: "".join(f"&#{ord(sign)};" for sign in text),
    lambda text: "".join(f"&#x{ord(sign):x};" for sign in text),
    lambda text: text.translate(_LEET),
    lambda text: text.translate(_LEET),
    lambda text: text.encode().hex(" "),
)
_MOST_BYTES = 400_000  # of a file that pieces are taken from
_PIECE_SIZES = (120, 400, 900, 2000, 3500)  # characters


def make_requests(known: Sequence[texts.Row]) -> list[texts.Row]:
    """Return attacks and harmless requests, the same ones each time. `known` are the rows to train on."""
    draw = random.Random(SEED)
    framed = [*_from_frames(draw)]
    rows = [*framed, *_from_programs(draw), *_sprinkled([*known, *framed], draw)]
    rows += [*_of_applications(draw), *_spelled(known, draw), *_everyday(draw)]
    return [{"source": row["family"], "cluster": row["text"], **row} for row in rows]


def read_frames(
    path: Path, labels: Sequence[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lists of entries in a file, and its frames by label."""
    lists: dict[str, list[str]] = {}
    frames: dict[str, list[str]] = collections.defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        label, is_frame, frame = line.partition(": ")
        name, is_list, entries = line.partition(" = ")
        if line.startswith("#"):
            continue
        if is_frame and label in labels:
            frames[label].append(frame.replace("\\n", "\n"))
        elif is_list:
            lists[name] = [entry.strip() for entry in entries.split(" | ")]
    return lists, frames


def fill(frame: str, lists: Mapping[str, Sequence[str]], draw: random.Random) -> str:
    """Return the frame with an entry drawn for each list that it names; lists that are not known stay as they are."""
    while True:
        filled = _SLOT.sub(
            lambda match: draw.choice(lists[match[1]]) if match[1] in lists else match[0], frame
        )
        if filled == frame:
            return filled
        frame = filled


def _from_frames(draw: random.Random) -> Iterator[texts.Row]:
    lists, frames = read_frames(_FRAMES, ("attack", "harmless"))
    for label, number in (("attack", NUM_ATTACKS), ("harmless", NUM_HARMLESS)):
        for count in range(number):
            text = fill(frames[label][count % len(frames[label])], lists, draw)
            text = text.upper() if draw.random() < 0.03 else text
            yield {
                "text": text,
                "label": "jailbreak" if label == "attack" else "benign",
                "family": "frames",
            }


def _of_applications(draw: random.Random) -> Iterator[texts.Row]:
    """Yield system prompts as applications have them."""
    lists, frames = read_frames(_FRAMES, ("application",))
    for count in range(NUM_APPLICATIONS):
        frame = frames["application"][count % len(frames["application"])]
        text = fill(frame, lists, draw)
        yield {"text": text, "label": "application", "family": "applications"}


def _from_programs(draw: random.Random) -> Iterator[texts.Row]:
    for package, pattern, share in _SOURCES:
        root = _root(package)
        paths = sorted(path for path in root.glob(pattern) if path.stat().st_size > 1000)
        paths = [path for path in paths if "site-packages" not in path.relative_to(root).parts]
        for _ in range(int(NUM_PROGRAMS * share) if paths else 0):
            content = draw.choice(paths).read_text(encoding="utf-8", errors="replace")
            content = content[:_MOST_BYTES]
            size = draw.choice(_PIECE_SIZES)
            start = draw.randrange(max(1, len(content) - size))
            piece = content[start : start + size]
            ask = draw.choice(_ASK)
            parts = (ask, piece) if draw.random() < 0.7 else (piece, ask)
            yield {"text": "\n".join(parts), "label": "benign", "family": "programs"}


def _sprinkled(known: Sequence[texts.Row], draw: random.Random) -> Iterator[texts.Row]:
    """Yield short harmless texts with words from attacks in them: a word alone is none."""
    harmless = [
        row["text"].split() for row in known if row["label"] == "benign" and len(row["text"]) < 250
    ]
    typical = typical_words(known)
    for _ in range(NUM_SPRINKLED):
        parts = list(draw.choice(harmless))
        for _ in range(draw.randint(1, 4)):
            word = draw.choice(typical)
            word = word.upper() if draw.random() < 0.2 else word
            place = draw.randrange(len(parts) + 1)
            parts[place : place + draw.randint(0, 1)] = [word]
        yield {"text": " ".join(parts), "label": "benign", "family": "sprinkled"}


def _spelled(known: Sequence[texts.Row], draw: random.Random) -> Iterator[texts.Row]:
    """Yield harmless texts in other spellings: a spelling alone is no attack."""
    harmless = [
        row["text"] for row in known if row["label"] == "benign" and 40 < len(row["text"]) < 600
    ]
    for number in range(NUM_SPELLED):
        spell = SPELLINGS[number % len(SPELLINGS)]
        yield {"text": spell(draw.choice(harmless)), "label": "benign", "family": "spelled"}


def _everyday(draw: random.Random) -> Iterator[texts.Row]:
    """Yield short orders as people give them: an order alone is no attack."""
    lists, frames = read_frames(_FRAMES, ("everyday",))
    for count in range(NUM_EVERYDAY):
        text = fill(frames["everyday"][count % len(frames["everyday"])], lists, draw)
        yield {"text": text[:1].upper() + text[1:], "label": "benign", "family": "everyday"}


def typical_words(known: Sequence[texts.Row]) -> list[str]:
    """Return the words that are most frequent in attacks beside harmless texts."""
    counts = {True: collections.Counter[str](), False: collections.Counter[str]()}
    totals: collections.Counter[bool] = collections.Counter()
    for row in known:
        is_attack = row["label"] != "benign"
        counts[is_attack].update(
            {word for word in words.tokenize(row["text"]).words if len(word) > 3}
        )
        totals[is_attack] += 1
    gains = {
        word: number / totals[True] * math.log(number / (counts[False][word] + 2))
        for word, number in counts[True].items()
    }
    return sorted(gains, key=lambda word: (-gains[word], word))[:NUM_TYPICAL]


def _root(package: str) -> Path:
    if not package:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; training takes programs from it")
    return Path(spec.origin).parent
