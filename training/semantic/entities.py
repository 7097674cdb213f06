"""Training of the tagger for names and addresses: a network of one hidden layer over the features of tokens."""

import collections
import random
import re
from collections.abc import Iterator, Sequence
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
LABEL_WEIGHTS = torch.tensor([1.0, 2.5, 1.5])
NUM_RENAMED = 3  # copies of a template with other names
FRAME_LABELS = ("person", "none")
NUM_FILLED = 25  # copies of a frame of our own
_FRAMES = Path(__file__).with_name("name_frames.txt")
_NAME_SLOT = re.compile(r"\{(person|first|last)\}")
EPOCHS, BATCH = 12, 512
MOST_HIDDEN = 1.3  # the share of words that are hidden in training is drawn from 0 to this
_SMALL_WORD = re.compile(r"(?<![\w'])[a-z]{2,20}(?![\w'])")
Spans = Sequence[tuple[int, int, int]]  # start, end and the number of the label
Sample = tuple[str, Spans | None]  # None: the text is without marks


def train(source: Path, names: Path, out: Path) -> None:
    """Fit the tagger; `names` has the lists of the package `names`."""
    draw = random.Random(SEED)
    torch.manual_seed(SEED)
    lists = read_lists(source, names)
    rows = texts.read(source, "pii_train")
    samples = [*read_marked(rows, lists, draw), *fill_frames(lists, draw), *_unmarked(source, draw)]
    vocabulary = _choose_vocabulary(samples)
    features = entities.TokenFeatures(lists, vocabulary)
    inputs, labels, weights = _encode(samples, features)
    model = _fit(inputs, labels, weights, len(vocabulary) + 1)
    _write(model, lists, vocabulary, out)


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
    return [sorted(first), sorted(last[:NUM_LAST_NAMES]), sorted(common)]


def read_shipped_lists() -> list[list[str]]:
    """Return first names, last names and common words of the tagger that is shipped."""
    with np.load(profile.WEIGHTS / "entities.npz", allow_pickle=False) as stored:
        return [bytes(stored[name]).decode().split("\n") for name in ("first", "last", "common")]


def read_marked(
    rows: Sequence[texts.Row], lists: Sequence[Sequence[str]], draw: random.Random
) -> Iterator[Sample]:
    """Yield the marked rows, and sentences from templates also with other names."""
    numbers = {label: number for number, label in enumerate(entities.LABELS)}
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
        ending_counts.update({"-" + token[-3:] for token in tokens if len(token) > 2})
    chosen = [word for word, count in word_counts.most_common(6000) if count > 3]
    return chosen + [ending for ending, count in ending_counts.most_common(2500) if count > 5]


def _encode(
    samples: Sequence[Sample], features: entities.TokenFeatures
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers of each candidate with its neighbours, int [candidates, tokens, 3], its label and weight."""
    reach = entities.REACH
    inputs, labels, weights = [], [], []
    for text, spans in samples:
        tokens = list(entities.TOKEN.finditer(text))
        computed = [features.of(token[0]) for token in tokens]
        candidates = [number for number, feature in enumerate(computed) if feature[3]]
        if not candidates:
            continue
        numbers = np.zeros((len(tokens) + 2 * reach, 3), np.int32)
        numbers[reach:-reach] = [feature[:3] for feature in computed]
        inputs.append(numbers[np.array(candidates)[:, None] + np.arange(2 * reach + 1)])
        labels += [
            next(
                (label for start, end, label in spans or () if start <= tokens[n].start() < end), 0
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
        self.output = torch.nn.Linear(HIDDEN, len(entities.LABELS))
        torch.nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the scores of labels for candidates with their neighbours."""
        rows = torch.cat(
            (
                self.words(numbers[..., 0]) + self.words(numbers[..., 1]),
                self.groups(numbers[..., 2]),
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
            numbers[..., :2][torch.rand(numbers.shape[:2]) < share] = 0
            losses = torch.nn.functional.cross_entropy(
                model(numbers), labels[batch], LABEL_WEIGHTS, reduction="none"
            )
            loss = (losses * weights[batch]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def _write(
    model: _Tagger, lists: Sequence[Sequence[str]], vocabulary: Sequence[str], out: Path
) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, table in (("words", model.words), ("groups", model.groups)):
        arrays[name], arrays[f"{name}_scale"] = linear.quantise(table.weight.detach().numpy())
    for name, layer in (("hidden", model.hidden), ("output", model.output)):
        arrays[name] = layer.weight.detach().numpy().T
        arrays[f"{name}_bias"] = layer.bias.detach().numpy()
    for name, entries in zip(
        ("first", "last", "common", "vocabulary"), (*lists, vocabulary), strict=True
    ):
        arrays[name] = np.frombuffer("\n".join(entries).encode(), np.uint8)
    np.savez_compressed(out / "entities.npz", **arrays)
