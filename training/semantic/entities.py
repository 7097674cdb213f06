"""Training of the tagger for names and addresses: a network of one hidden layer over the features of tokens."""

import collections
import importlib
import pkgutil
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from dynamo.semantic.classifiers import entities, profile
from training.semantic import linear, requests, texts

SEED = 20
WIDTH, GROUP_WIDTH, HIDDEN = 24, 12, 96
NUM_LAST_NAMES = 20_000  # the most frequent ones of the census
NUM_EXAMS, NUM_CHATS = 2500, 1500  # texts without marks; their names are no personal data
UNMARKED_NAME_WEIGHT = 0.05  # of a listed name in a text without marks: it may be one
LABEL_WEIGHTS = torch.tensor([1.0, 3.0, 1.5, 1.0, 1.0])
NUM_WORDS, NUM_ENDINGS = 6000, 4500
NUM_RENAMED = 3  # copies of a template with other names
TRAINED_LABELS = (*entities.LABELS, "GPE", "ORGANIZATION")  # the last two are not looked for
OTHERS = -1  # the label of a token in a text without marks: neither name nor address
FRAME_LABELS = ("person", "none")
NUM_FILLED = 12  # copies of a frame of our own
_FRAMES = Path(__file__).with_name("name_frames.txt")
_NAME_SLOT = re.compile(r"\{(person|first|last)\}")
NUM_MEMBERS = (
    3  # networks whose scores are averaged: by chance one of them is much worse than another
)
EPOCHS, BATCH = 12, 512
MOST_HIDDEN = (
    3.0  # the share of words that are hidden in training is drawn from 0 to this; above 1, all are
)
_SMALL_WORD = re.compile(r"(?<![\w'])[a-z]{2,20}(?![\w'])")
_FIRST, _LAST = re.compile("first_names"), re.compile("last_names|surnames")
_LATIN = re.compile(r"(?<![^\W])[a-z\u00df-\u024f\u1e00-\u1eff]{2,}(?![^\W])")
Spans = Sequence[tuple[int, int, int]]  # start, end and the number of the label
Sample = tuple[str, Spans | None]  # None: the text is without marks


def train(source: Path, names: Path, out: Path) -> None:
    """Fit the tagger; `names` has the lists of the package `names`."""
    draw = random.Random(SEED)
    lists = read_lists(source, names)
    rows = texts.read(source, "pii_train")
    samples = [*read_marked(rows, lists, draw), *fill_frames(lists, draw), *_unmarked(source, draw)]
    vocabulary = _choose_vocabulary(samples)
    features = entities.TokenFeatures(lists, vocabulary)
    inputs, labels, weights = _encode(samples, features)
    models = []
    for member in range(NUM_MEMBERS):
        torch.manual_seed(SEED + member)
        models.append(_fit(inputs, labels, weights, len(vocabulary) + 1))
    _write(models, lists, vocabulary, out)


def read_lists(source: Path, names: Path) -> list[list[str]]:
    """Return first names, last names and common words, sorted."""
    first = {
        line.split()[0].lower()
        for kind in ("male.first", "female.first")
        for line in (names / f"dist.{kind}").open()
    }
    last = [line.split()[0].lower() for line in (names / "dist.all.last").open()]
    counts: collections.Counter[str] = collections.Counter()
    for name in ("domain_train", "jailbreak_train"):
        for row in texts.read(source, name):
            counts.update(_SMALL_WORD.findall(row["text"]))
    common = {word for word, count in counts.items() if count > 1}
    more_first, more_last = read_names_of_nations()
    return [
        sorted(first | more_first),
        sorted({*last[:NUM_LAST_NAMES], *more_last}),
        sorted(common),
    ]


def read_names_of_nations() -> tuple[set[str], set[str]]:
    """Return the parts of first and last names in Latin letters that the package Faker has of some sixty regions."""
    first: set[str] = set()
    last: set[str] = set()
    package = importlib.import_module("faker.providers.person")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name == "en":  # thousands of rare ones, such as Haskell
            continue
        provider = importlib.import_module(f"{package.__name__}.{module.name}").Provider
        for field in dir(provider):
            entries = getattr(provider, field)
            chosen = first if _FIRST.match(field) else last if _LAST.match(field) else None
            if chosen is not None and isinstance(entries, Iterable):
                chosen.update(part for name in entries for part in _LATIN.findall(name.lower()))
    return first, last


def read_shipped_lists() -> list[list[str]]:
    """Return first names, last names and common words of the tagger that is shipped."""
    with np.load(profile.WEIGHTS / "entities.npz", allow_pickle=False) as stored:
        return [bytes(stored[name]).decode().split("\n") for name in ("first", "last", "common")]


def read_marked(
    rows: Sequence[texts.Row], lists: Sequence[Sequence[str]], draw: random.Random
) -> Iterator[Sample]:
    """Yield the marked rows, and sentences from templates also with other names."""
    numbers = {label: number for number, label in enumerate(TRAINED_LABELS)}
    for row in rows:
        spans = sorted(
            (start, end, numbers[kind]) for start, end, kind in row["spans"] if kind in numbers
        )
        yield row["text"], spans
        if row["source"] != "wnut17" and any(label == 1 for _, _, label in spans):
            for _ in range(NUM_RENAMED):
                yield _rename(row["text"], spans, lists, draw)


def _rename(
    text: str,
    spans: Spans,
    lists: Sequence[Sequence[str]],
    draw: random.Random,
) -> Sample:
    """Return the text with other names: a template must not be learnt by the names in it."""
    pieces, renamed, position, length = [], [], 0, 0
    for start, end, label in spans:
        pieces.append(text[position:start])
        written = text[start:end]
        if label == 1:
            first, last = _draw_name(lists, draw)
            initial = f"{last[0]}. " if draw.random() < 0.2 else ""
            is_whole = " " in written
            written = f"{first} {initial}{last}" if is_whole else draw.choice((first, last))
        length += len(pieces[-1])
        renamed.append((length, length + len(written), label))
        length += len(written)
        pieces.append(written)
        position = end
    changed = "".join(pieces) + text[position:]
    return (changed.lower() if draw.random() < 0.1 else changed), renamed


def fill_frames(lists: Sequence[Sequence[str]], draw: random.Random) -> Iterator[Sample]:
    """Yield sentences of our own, with names and without any."""
    entries, frames = requests.read_frames(_FRAMES, FRAME_LABELS)
    for frame in (*frames["person"], *frames["none"]):
        for _ in range(NUM_FILLED):
            yield _fill_names(requests.fill(frame, entries, draw), lists, draw)


def _fill_names(frame: str, lists: Sequence[Sequence[str]], draw: random.Random) -> Sample:
    text, spans, position = "", [], 0
    for slot in _NAME_SLOT.finditer(frame):
        text += frame[position : slot.start()]
        first, last = _draw_name(lists, draw)
        middle = draw.choice(("", "", "", f"{last[0]} ", f"{first[-1].upper()}. "))
        written = {"person": f"{first} {middle}{last}", "first": first, "last": last}[slot[1]]
        spans.append((len(text), len(text) + len(written), 1))
        text += written
        position = slot.end()
    text += frame[position:]
    return (text.lower() if draw.random() < 0.1 else text), spans


def _draw_name(lists: Sequence[Sequence[str]], draw: random.Random) -> tuple[str, str]:
    first, last = (draw.choice(entries).capitalize() for entries in lists[:2])
    if draw.random() < 0.4:  # names that no list has
        first, last = _invent(first, last), _invent(last, first)
    return first, last


def _invent(name: str, other: str) -> str:
    return (name[: len(name) // 2 + 1] + other[len(other) // 2 :].lower()).capitalize()


def _unmarked(source: Path, draw: random.Random) -> Iterator[Sample]:
    exams = draw.sample(texts.read(source, "domain_train"), NUM_EXAMS)
    chats = [row for row in texts.read(source, "jailbreak_train") if row["label"] == "benign"]
    for row in (*exams, *draw.sample(chats, NUM_CHATS)):
        yield row["text"][:1500], None


def _choose_vocabulary(samples: Sequence[Sample]) -> list[str]:
    """Return words and endings that occur in several texts; words inside names would be learnt by heart."""
    word_counts: collections.Counter[str] = collections.Counter()
    ending_counts: collections.Counter[str] = collections.Counter()
    for text, spans in samples:
        names = [(start, end) for start, end, label in spans or () if label == 1]
        tokens = {
            match[0].lower()
            for match in entities.TOKEN.finditer(text)
            if not match[0].isspace()
            and not any(start <= match.start() < end for start, end in names)
        }
        word_counts.update(tokens)
        long = [token for token in tokens if len(token) > 2]
        ending_counts.update(
            {f"-{token[-3:]}" for token in long} | {f"{token[:3]}-" for token in long}
        )
    chosen = [word for word, count in word_counts.most_common(NUM_WORDS) if count > 3]
    return chosen + [
        ending for ending, count in ending_counts.most_common(NUM_ENDINGS) if count > 5
    ]


def _encode(
    samples: Sequence[Sample], features: entities.TokenFeatures
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers of each candidate with its neighbours, int [candidates, tokens, 4], its label and weight."""
    reach = entities.REACH
    inputs, labels, weights = [], [], []
    for text, spans in samples:
        tokens = list(entities.TOKEN.finditer(text))
        computed = [features.of(token[0]) for token in tokens]
        candidates = [number for number, feature in enumerate(computed) if feature[4]]
        if not candidates:
            continue
        numbers = np.zeros((len(tokens) + 2 * reach, 4), np.int32)
        numbers[reach:-reach] = [feature[:4] for feature in computed]
        inputs.append(numbers[np.array(candidates)[:, None] + np.arange(2 * reach + 1)])
        labels += [
            next(
                (label for start, end, label in spans or () if start <= tokens[n].start() < end),
                OTHERS if spans is None else 0,
            )
            for n in candidates
        ]
        weights += [
            UNMARKED_NAME_WEIGHT if spans is None and features.is_name(tokens[n][0]) else 1.0
            for n in candidates
        ]
    return (
        torch.from_numpy(np.concatenate(inputs)).long(),
        torch.tensor(labels),
        torch.tensor(weights),
    )


class _Tagger(torch.nn.Module):
    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(num_words, WIDTH)
        self.groups = torch.nn.Embedding(entities.TokenFeatures.num_groups, GROUP_WIDTH)
        size = (2 * entities.REACH + 1) * (WIDTH + GROUP_WIDTH)
        self.hidden = torch.nn.Linear(size, HIDDEN)
        self.output = torch.nn.Linear(HIDDEN, len(TRAINED_LABELS))
        torch.nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the scores of labels for candidates with their neighbours."""
        rows = torch.cat(
            (
                self.words(numbers[..., :3]).sum(-2),
                self.groups(numbers[..., 3]),
            ),
            dim=-1,
        ).flatten(1)
        dropped = torch.nn.functional.dropout(rows, 0.1, self.training)
        return self.output(torch.relu(self.hidden(dropped)))


def _fit(
    inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, num_words: int
) -> _Tagger:
    model = _Tagger(num_words)
    steps = EPOCHS * (len(labels) // BATCH + 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            numbers = inputs[batch].clone()
            # words are hidden, so that lists and shapes are learnt too: all of a text's, or some
            share = torch.rand(len(batch), 1) * MOST_HIDDEN
            numbers[..., :3][torch.rand(numbers.shape[:2]) < share] = 0
            loss = (_losses(model(numbers), labels[batch]) * weights[batch]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def _losses(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each candidate; OTHERS is met by any label but those of names and addresses."""
    logs = torch.log_softmax(scores, -1)
    others = torch.logsumexp(logs[:, [0, *range(len(entities.LABELS), len(TRAINED_LABELS))]], -1)
    own = logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -torch.where(labels == OTHERS, others, own) * LABEL_WEIGHTS[labels.clamp(min=0)]


def _write(
    models: Sequence[_Tagger], lists: Sequence[Sequence[str]], vocabulary: Sequence[str], out: Path
) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name in ("words", "groups"):
        tables = [getattr(model, name).weight.detach().numpy() for model in models]
        rows, scales = zip(*(linear.quantise(table) for table in tables), strict=True)
        arrays[name], arrays[f"{name}_scale"] = np.stack(rows, axis=1), np.stack(scales)
    for name in ("hidden", "output"):
        layers = [getattr(model, name) for model in models]
        arrays[name] = np.stack([layer.weight.detach().numpy().T for layer in layers])
        arrays[f"{name}_bias"] = np.stack([layer.bias.detach().numpy() for layer in layers])[
            :, None
        ]
    shape = (len(models), 2 * entities.REACH + 1, WIDTH + GROUP_WIDTH, HIDDEN)
    arrays["hidden"] = arrays["hidden"].reshape(shape).astype(np.float16)
    for name, entries in zip(
        ("first", "last", "common", "vocabulary"), (*lists, vocabulary), strict=True
    ):
        arrays[name] = np.frombuffer("\n".join(entries).encode(), np.uint8)
    np.savez_compressed(out / "entities.npz", **arrays)
