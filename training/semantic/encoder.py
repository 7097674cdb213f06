"""Train the exact profile: LoRA adapters and heads over a MiniLM, for domain, attacks and names in one pass.

`python -m training.semantic.encoder --base DIRECTORY --texts DIRECTORY --state FILE` goes on where `--state` ends, for
`--minutes`, and writes adapters and heads when the whole budget of CPU time is used. The base model is never changed.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from dynamo.semantic.classifiers import attacks
from dynamo.semantic.classifiers import entities as fast_entities
from dynamo.worker import classifier_set
from training.semantic import entities, requests, texts, train

SEED = 20
RANK, SCALE = 16, 2  # of the adapters; what their product is multiplied by (PEFT's alpha / rank)
TARGETS = ("query", "key", "value", "dense")
FIRST_LAYER = 1  # with adapters: below it nothing has to be differentiated
NAME_LABELS = ("O", "B-PERSON", "I-PERSON", "B-STREET_ADDRESS", "I-STREET_ADDRESS")
ATTACK_LABELS = ("benign", "jailbreak", "application")  # in the order of `attacks.KINDS`
ATTACK = attacks.KINDS.index("attack")
SIZES = (64, 128, 128, 192)  # tokens of a window of a long text, drawn for each batch
BATCH_TOKENS = 1536
TASKS = ("domain", "attack", "names")
LORA_RATE, HEAD_RATE = 1e-3, 3e-3
NUM_UNMARKED = 1500  # exam questions without marks, and as many harmless requests
UNMARKED_WEIGHT = 0.15  # of a token in a text without marks: it may be a name
FALSE_ALARMS = 0.02  # of the harmless texts that are kept back
SHORT_SOURCES = ("mmlu", "clinc150", "banking77", "gsm8k")  # too easy to set a threshold by
TERM_FRAMES, PLAIN_COPIES = 2, 6
FRAMED_SHARE = 0.5  # of the requests from frames and around programs
CHECKPOINT_S = 300.0  # CPU-seconds between two writes of the state
OUT = train.OUT / "exact"
LEFT_OUT = (*train.LEFT_OUT, "bipia-clean")  # documents of which some hide an instruction


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A way to train; `further` goes on from the mean of the first two (`encoder_mean`)."""

    shares: Sequence[float]  # of the batches, by task
    # Of the tokens of a text, by task: the share is drawn from 0 to this.
    most_hidden: Sequence[float]
    cpu_seconds: float
    rate: float = 1.0
    seed: int = SEED


RECIPES = {
    "whole": Recipe((0.42, 0.3, 0.28), (0.0, 0.0, 0.0), 2700.0),
    "hidden": Recipe((0.5, 0.32, 0.18), (0.15, 0.15, 0.4), 5000.0),
    "further": Recipe((0.45, 0.37, 0.18), (0.15, 0.15, 0.3), 5200.0, rate=0.5, seed=21),
}


class LoraLinear(torch.nn.Module):
    """A frozen projection with a trained one of low rank beside it, as PEFT computes it."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of x."""
        change: torch.Tensor = self.lora_B(self.lora_A(x))
        base: torch.Tensor = self.base(x)
        return base + change * SCALE


class ExactModel(torch.nn.Module):
    """The encoder with its adapters and three heads."""

    def __init__(self, base: Path, classes: Sequence[str], rank: int = RANK) -> None:
        super().__init__()
        self.rank = rank
        self.encoder = transformers.BertModel.from_pretrained(base, add_pooling_layer=False)
        self.encoder.requires_grad_(False)
        for name, module in list(self.encoder.named_modules()):
            parent_name, _, last = name.rpartition(".")
            is_adapted = isinstance(module, torch.nn.Linear) and last in TARGETS
            if is_adapted and int(name.split(".")[2]) >= FIRST_LAYER:
                setattr(self.encoder.get_submodule(parent_name), last, LoraLinear(module, rank))
        width = self.encoder.config.hidden_size
        self.heads = torch.nn.ModuleDict(
            {
                "domain": torch.nn.Linear(width, len(classes)),
                "attack": torch.nn.Linear(width, len(attacks.KINDS)),
                "names": torch.nn.Linear(width, len(NAME_LABELS)),
            }
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, task: str) -> torch.Tensor:
        """Return the scores of texts [texts, classes], or of tokens [texts, tokens, labels] for `names`."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if task != "names":
            share = mask.unsqueeze(-1).to(hidden.dtype)
            hidden = (hidden * share).sum(1) / share.sum(1)
        scores: torch.Tensor = self.heads[task](hidden)
        return scores


Sample = tuple[list[int], Any, float]  # token ids without special ones, label or labels, weight


class Samples:
    """The texts of the three tasks as token ids, and batches drawn from them."""

    def __init__(
        self, source: Path, tokenizer: tokenizers.Tokenizer, classes: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._cls, self._sep, self._hidden = (
            tokenizer.token_to_id(sign) for sign in ("[CLS]", "[SEP]", "[MASK]")
        )
        draw = random.Random(SEED)
        self.by_task: dict[str, list[Sample]] = {
            "domain": list(self._read_domain(source, classes, draw)),
            "attack": list(self._read_attacks(source, draw)),
            "names": list(self._read_names(source, draw)),
        }

    def _ids(self, rows: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(list(rows), add_special_tokens=False)
        return [one.ids for one in encoded]

    def _read_domain(
        self, source: Path, classes: Sequence[str], draw: random.Random
    ) -> Iterator[Sample]:
        rows = [
            *texts.read(source, "domain_train"),
            *texts.read_plain_questions()[0] * PLAIN_COPIES,
        ]
        for row in texts.read_topic_terms():
            rows += [
                {"text": frame.format(row["text"]), "category": row["category"]}
                for frame in draw.sample(train.FRAMES, TERM_FRAMES)
            ]
        for row, ids in zip(rows, self._ids([row["text"] for row in rows]), strict=True):
            yield ids, classes.index(row["category"]), 1.0

    def _read_attacks(self, source: Path, draw: random.Random) -> Iterator[Sample]:
        known = [row for row in attack_rows(source) if not is_kept_back(row)]
        framed = requests.make_requests(known)
        rows = [*known, *draw.sample(framed, int(len(framed) * FRAMED_SHARE))]
        for row, ids in zip(rows, self._ids([row["text"][:20_000] for row in rows]), strict=True):
            kind = attacks.KINDS.index(train.KIND_BY_LABEL[row["label"]])
            for _ in range(2 if kind == ATTACK else 1):
                yield ids, kind, 1.0

    def _read_names(self, source: Path, draw: random.Random) -> Iterator[Sample]:
        lists, marked = entities.read_shipped_lists(), texts.read(source, "pii_train")
        samples: list[entities.Sample] = [
            *entities.read_marked(marked, lists, draw),
            *entities.read_marked([r for r in marked if r["source"] == "wnut17"], lists, draw),
            *entities.fill_frames(lists, draw),
        ]
        harmless = [row for row in attack_rows(source) if row["label"] == "benign"]
        for rows in (texts.read(source, "domain_train"), harmless):
            samples += [(row["text"][:1500], None) for row in draw.sample(rows, NUM_UNMARKED)]
        encoded = self._tokenizer.encode_batch(
            [text for text, _ in samples], add_special_tokens=False
        )
        for (_, spans), one in zip(samples, encoded, strict=True):
            weight = UNMARKED_WEIGHT if spans is None else 1.0
            yield one.ids, label_tokens(one.offsets, spans or ()), weight

    def batches(
        self, draw: random.Random, recipe: Recipe
    ) -> Iterator[tuple[str, torch.Tensor, ...]]:
        """Yield task, ids, mask, labels and weights, without end."""
        most_hidden = dict(zip(TASKS, recipe.most_hidden, strict=True))
        queues: dict[str, list[list[Sample]]] = {task: [] for task in TASKS}
        while True:
            task = draw.choices(TASKS, recipe.shares)[0]
            if not queues[task]:
                queues[task] = self._cut_epoch(task, draw)
            yield task, *self._pack(self._hide(queues[task].pop(), most_hidden[task], draw))

    def _hide(self, batch: Sequence[Sample], most: float, draw: random.Random) -> list[Sample]:
        """Return the texts with some tokens hidden, others each time, so that none is learnt by heart."""
        hidden = []
        for ids, label, weight in batch:
            share = most * draw.random()
            ids = [self._hidden if draw.random() < share else token_id for token_id in ids]
            hidden.append((ids, label, weight))
        return hidden

    def _cut_epoch(self, task: str, draw: random.Random) -> list[list[Sample]]:
        """Return one epoch as batches of texts of similar length, in random order."""
        size = draw.choice(SIZES)
        pieces = [_cut(sample, size, draw, task) for sample in self.by_task[task]]
        pieces.sort(key=lambda piece: len(piece[0]) + draw.random() * 8)
        batches: list[list[Sample]] = [[]]
        for piece in pieces:
            if batches[-1] and (len(batches[-1]) + 1) * (len(piece[0]) + 2) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(piece)
        draw.shuffle(batches)
        return batches

    def _pack(self, batch: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
        width = max(len(ids) for ids, _, _ in batch) + 2
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        labels: list[Any] = []
        for row, (token_ids, label, _) in enumerate(batch):
            line = [self._cls, *token_ids, self._sep]
            ids[row, : len(line)] = torch.tensor(line)
            mask[row, : len(line)] = 1
            if isinstance(label, list):
                label = [-100, *label] + [-100] * (width - 1 - len(label))
            labels.append(label)
        return ids, mask, torch.tensor(labels), torch.tensor([weight for _, _, weight in batch])


def _cut(sample: Sample, size: int, draw: random.Random, task: str) -> Sample:
    ids, label, weight = sample
    size -= 2
    if len(ids) <= size:
        return sample
    start = 0 if draw.random() < 0.5 else draw.randrange(len(ids) - size + 1)
    if task == "domain":
        start = draw.choice((0, len(ids) - size))
    piece = label[start : start + size] if isinstance(label, list) else label
    return ids[start : start + size], piece, weight


def attack_rows(source: Path) -> list[texts.Row]:
    """Return the rows that the attack head is made for."""
    return [
        row
        for row in texts.read(source, "jailbreak_train")
        if row["label"] != "harmful" and row["family"] not in LEFT_OUT
    ]


def is_kept_back(row: texts.Row) -> bool:
    """Return whether a harmless text is kept from fitting, to set the threshold by."""
    return row["label"] == "benign" and texts.is_held_out(row["cluster"])


def label_tokens(offsets: Sequence[tuple[int, int]], spans: entities.Spans) -> list[int]:
    """Return the number of the label of each token."""
    labels = [0] * len(offsets)
    for start, end, label in spans:
        if label >= len(fast_entities.LABELS):  # places and organisations
            continue
        number = NAME_LABELS.index(f"B-{fast_entities.LABELS[label]}")
        inside = [n for n, (first, last) in enumerate(offsets) if first < end and last > start]
        for position, token in enumerate(inside):
            labels[token] = number + (position > 0)
    return labels


def load_start(base: Path, classes: Sequence[str], start: Path | None) -> ExactModel:
    """Return a model to train: a new one, or the adapters and heads of a directory on the base."""
    if start is None:
        return ExactModel(base, classes)
    model = ExactModel(base, classes, json.loads((start / "adapter_config.json").read_bytes())["r"])
    adapters = safetensors.torch.load_file(start / "adapter_model.safetensors")
    heads = safetensors.torch.load_file(start / "heads.safetensors")
    state = {f"encoder.{name.split('.', 2)[2]}": value.float() for name, value in adapters.items()}
    state |= {f"heads.{name}": value.float() for name, value in heads.items()}
    if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
        raise SystemExit(f"{start}: expected adapters and heads of this model, not {unknown[0]}")
    return model


def measure_loss(model: ExactModel, task: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    ids, mask, labels, weights = parts
    scores = model(ids, mask, task).float()
    if task == "names":
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        known = (labels >= 0) * weights.unsqueeze(1)
        return (losses * known).sum() / known.sum()
    return F.cross_entropy(scores, labels, label_smoothing=0.05)


def main() -> None:
    """Train for some minutes, or write what was trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, default=Path("../shared/data/text"))
    parser.add_argument(
        "--state", type=Path, required=True, help="file to resume from and write to"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="wall time of this piece")
    parser.add_argument("--start", type=Path, help="directory of adapters and heads to begin with")
    parser.add_argument("--recipe", choices=RECIPES, default="hidden")
    parser.add_argument("--budget", type=float, help="CPU-seconds of all pieces (the recipe's)")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    arguments.budget = arguments.budget or recipe.cpu_seconds
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    classes = sorted({row["category"] for row in texts.read(arguments.texts, "domain_train")})
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = load_start(arguments.base, classes, arguments.start)
    is_done = _train(model, Samples(arguments.texts, tokenizer, classes), arguments, recipe)
    if is_done:
        calibrate(model, tokenizer, arguments.texts)
    write(model, classes, arguments.out)
    print("the budget is used" if is_done else "to be resumed")


def _train(
    model: ExactModel, samples: Samples, arguments: argparse.Namespace, recipe: Recipe
) -> bool:
    """Train until the piece or the budget ends; return whether the budget ended."""
    lora = [p for n, p in model.named_parameters() if "lora_" in n]
    groups = [
        {"params": lora, "base": LORA_RATE * recipe.rate},
        {"params": list(model.heads.parameters()), "base": HEAD_RATE * recipe.rate},
    ]
    optimiser = torch.optim.AdamW(groups, lr=LORA_RATE, weight_decay=0.01)
    used, step, saved = 0.0, 0, 0.0
    if arguments.state.exists():
        state = torch.load(arguments.state, weights_only=True)
        model.load_state_dict(state["model"], strict=False)
        optimiser.load_state_dict(state["optimiser"])
        used, step = state["used"], state["step"]
        saved = used
    draw = random.Random(recipe.seed * 1000 + step)
    end = time.monotonic() + arguments.minutes * 60
    losses: dict[str, list[float]] = {task: [] for task in TASKS}
    start = time.process_time()
    model.train()
    for task, *parts in samples.batches(draw, recipe):
        total = used + time.process_time() - start
        if total - saved >= CHECKPOINT_S:
            _save(model, optimiser, total, step, arguments.state)
            saved = total
        if total >= arguments.budget or time.monotonic() >= end:
            break
        rate = min(1.0, (step + 1) / 40) * max(0.02, 1 - total / arguments.budget)
        for group in optimiser.param_groups:
            group["lr"] = group["base"] * rate
        with torch.autocast("cpu", torch.bfloat16):  # 1.6 times as fast where the processor has it
            loss = measure_loss(model, task, parts)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lora, 1.0)
        optimiser.step()
        losses[task].append(loss.item())
        step += 1
        if step % 20 == 0:
            means = {k: round(float(np.mean(v[-60:])), 3) for k, v in losses.items() if v}
            print(step, f"{total:.0f} CPU-s", means, flush=True)
    used += time.process_time() - start
    _save(model, optimiser, used, step, arguments.state)
    return used >= arguments.budget


def _save(
    model: ExactModel, optimiser: torch.optim.Optimizer, used: float, step: int, path: Path
) -> None:
    trained = {n: p for n, p in model.state_dict().items() if "lora_" in n or "heads." in n}
    state = {"model": trained, "optimiser": optimiser.state_dict(), "used": used, "step": step}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def calibrate(model: ExactModel, tokenizer: tokenizers.Tokenizer, source: Path) -> None:
    """Shift the attack head so that few of the harmless texts that were kept back pass the usual threshold."""
    rows = [
        row
        for row in attack_rows(source)
        if is_kept_back(row) and row["source"] not in SHORT_SOURCES
    ]
    margins = []
    model.eval()
    with torch.inference_mode():
        for row in rows:
            ids = tokenizer.encode(row["text"], add_special_tokens=True).ids
            cls, sep, inner = ids[:1], ids[-1:], ids[1:-1]
            size, overlap = classifier_set.EXACT_WINDOW, classifier_set.EXACT_OVERLAP
            windows = classifier_set.cut_windows(min(len(inner), 2048), size, overlap)
            batch = torch.tensor([[*cls, *inner[start:end], *sep] for start, end in windows])
            scores = model(batch, torch.ones_like(batch), "attack")
            attack = scores[:, ATTACK].clone()
            scores[:, ATTACK] = -torch.inf
            margins.append((attack - scores.logsumexp(1)).max().item())
    offset = float(np.quantile(margins, 1 - FALSE_ALARMS)) - attacks.USUAL_MARGIN
    model.heads["attack"].bias.data[ATTACK] -= offset
    print(f"offset {offset:.2f} from {len(rows)} harmless texts")


def write(model: ExactModel, classes: Sequence[str], out: Path) -> None:
    """Write adapters in PEFT's layout and heads, in 16 bits."""
    out.mkdir(parents=True, exist_ok=True)
    adapters = {
        f"base_model.model.{name.removeprefix('encoder.')}": value.half().contiguous()
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    safetensors.torch.save_file(adapters, out / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "r": model.rank,
        "lora_alpha": model.rank * SCALE,
        "target_modules": list(TARGETS),
        "layers_to_transform": list(range(FIRST_LAYER, 6)),
        "bias": "none",
        "base_model_name_or_path": "sentence-transformers/all-MiniLM-L6-v2",
    }
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    heads = {name: value.half() for name, value in model.heads.state_dict().items()}
    safetensors.torch.save_file(heads, out / "heads.safetensors")
    labels = {"domain": list(classes), "attack": ATTACK_LABELS, "names": NAME_LABELS}
    (out / "heads.json").write_text(json.dumps(labels, indent=2) + "\n")


if __name__ == "__main__":
    main()
