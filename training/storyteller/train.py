"""Trains the storyteller on one CPU core, within a budget of CPU time.

    python -m training.storyteller.train --out build/storyteller --cpu-seconds 3000

The schedule follows the share of the budget that is spent, so a busy machine changes how long the
training takes and hardly what comes out. Muon trains the matrices inside the layers, AdamW the
embedding and the norms.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from training.storyteller.corpus import Corpus, build_corpus, draw_conversations
from training.storyteller.far_questions import read_far_questions
from training.storyteller.model import (
    load_to_continue,
    make_config,
    make_model,
    residual_writers,
    save_model,
)
from training.storyteller.render import render
from training.storyteller.tokenizer import save_tokenizer, train_tokenizer

TOKENIZER_CONVERSATIONS = 6000
WARM_UP_STEPS = 40
CONSTANT_SHARE = 0.4
MUON_RATE, ADAM_RATE, WRITER_SHARE = 0.01, 3e-3, 0.2
# (window length, rows, share of the steps): the long ones train the positions up to the limit.
WINDOWS = ((384, 10, 0.8), (1024, 4, 0.1), (2047, 2, 0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What the command line decides."""

    out: Path
    cpu_seconds: float
    wall_seconds: float
    num_conversations: int
    seed: int
    rate: float
    continue_from: Path | None
    residual_scale: float
    texts: Path | None
    report_every: int
    save_every: int


def parse_options(arguments: list[str]) -> TrainingOptions:
    parser = argparse.ArgumentParser(
        prog="python -m training.storyteller.train", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--cpu-seconds", type=float, default=3000, help="CPU time to train for (%(default)s)"
    )
    parser.add_argument(
        "--wall-seconds", type=float, default=float("inf"), help="end after this time at the latest"
    )
    parser.add_argument(
        "--conversations", type=int, default=16_000, help="how many to generate (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of text, start and batches")
    parser.add_argument("--rate", type=float, default=1.0, help="factor for all learning rates")
    parser.add_argument("--continue-from", type=Path, help="start from the model in this folder")
    parser.add_argument(
        "--residual-scale", type=float, default=1.0, help="factor for what its layers write"
    )
    parser.add_argument(
        "--texts", type=Path, help="folder of public texts, for questions to refuse"
    )
    parser.add_argument("--report-every", type=int, default=25, help="steps between reports")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    values = parser.parse_args(arguments)
    return TrainingOptions(
        out=values.out,
        cpu_seconds=values.cpu_seconds,
        wall_seconds=values.wall_seconds,
        num_conversations=values.conversations,
        seed=values.seed,
        rate=values.rate,
        continue_from=values.continue_from,
        residual_scale=values.residual_scale,
        texts=values.texts,
        report_every=values.report_every,
        save_every=values.save_every,
    )


class Optimisers:
    """Muon for the inner matrices and AdamW for the rest, driven by one rate.

    Muon's steps are of one size whatever the gradient's. Matrices that write into the residual
    stream would soon outgrow the embedding in it, and then a token's identity (a name, say) cannot
    be copied from it: these take smaller steps.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        inner = [
            weight
            for name, weight in model.named_parameters()
            if weight.ndim == 2 and "embed" not in name
        ]
        writers = residual_writers(model)
        written = {id(weight) for weight in writers}
        readers = [weight for weight in inner if id(weight) not in written]
        held = {id(weight) for weight in inner}
        self._rest = [weight for weight in model.parameters() if id(weight) not in held]
        self._rated = (
            (_muon(readers), MUON_RATE),
            (_muon(writers), MUON_RATE * WRITER_SHARE),
            (torch.optim.AdamW(self._rest, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
        )

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        for optimiser, base in self._rated:
            for group in optimiser.param_groups:
                group["lr"] = base * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def _muon(weights: list[torch.Tensor]) -> torch.optim.Muon:
    return torch.optim.Muon(weights, momentum=0.95, weight_decay=0.01)


class Budget:
    """How much of the time is spent: of the CPU's, or of the wall's where that runs out first."""

    def __init__(self, options: TrainingOptions) -> None:
        self._options = options
        self._cpu_start, self._wall_start = time.process_time(), time.monotonic()

    def cpu_seconds(self) -> float:
        return time.process_time() - self._cpu_start

    def spent_share(self) -> float:
        wall_seconds = time.monotonic() - self._wall_start
        return max(
            self.cpu_seconds() / self._options.cpu_seconds,
            wall_seconds / self._options.wall_seconds,
        )


def rate_at(step: int, share: float) -> float:
    """Warm up by steps, stay constant, then fall in a line to zero with the budget."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * min(1.0, max(0.0, (1.0 - share) / (1.0 - CONSTANT_SHARE)))


def mean_loss(model: Qwen3ForCausalLM, tokens: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """Mean cross entropy of the next token where it counts; elsewhere no logit is computed."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    counted = torch.from_numpy(counts[:, 1:].reshape(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[counted])
    return functional.cross_entropy(logits.float(), ids[:, 1:].reshape(-1)[counted])


@torch.no_grad()
def validation_loss(model: Qwen3ForCausalLM, corpus: Corpus) -> float:
    """The loss on what the model has to say, over fixed windows of text that is not trained on."""
    random = np.random.default_rng(0)
    tokens, weights = corpus.draw_windows(random, 24, 768)
    rows = (slice(0, 8), slice(8, 16), slice(16, 24))
    parts = [mean_loss(model, tokens[each], weights[each] == 1.0) for each in rows]
    return float(torch.stack(parts).mean())


def train(options: TrainingOptions) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = _make_tokenizer(options)
    save_tokenizer(tokenizer, options.out)
    far_questions = read_far_questions(options.texts) if options.texts else None
    corpus = build_corpus(tokenizer, f"{options.seed}", options.num_conversations, far_questions)
    held_out = build_corpus(tokenizer, "validation", 300)
    source = options.continue_from
    model = (
        load_to_continue(source, options.residual_scale)
        if source
        else make_model(make_config(tokenizer))
    )
    num_parameters = sum(weight.numel() for weight in model.parameters())
    _say(f"{num_parameters:,} parameters, vocabulary {tokenizer.get_vocab_size():,}, "
         f"{corpus.num_tokens:,} tokens of text")  # fmt: skip
    _run(model, corpus, held_out, options)


def _make_tokenizer(options: TrainingOptions) -> Tokenizer:
    if options.continue_from:
        return Tokenizer.from_file(str(options.continue_from / "tokenizer.json"))
    texts = draw_conversations(f"{options.seed}", TOKENIZER_CONVERSATIONS)
    return train_tokenizer(render(each) for each in texts)


def _run(
    model: Qwen3ForCausalLM, corpus: Corpus, held_out: Corpus, options: TrainingOptions
) -> None:
    random = np.random.default_rng(options.seed)
    optimisers, budget = Optimisers(model), Budget(options)
    step, num_tokens, recent = 0, 0, 0.0
    while (share := budget.spent_share()) < 1.0:
        length, rows, _ = WINDOWS[random.choice(len(WINDOWS), p=[each[2] for each in WINDOWS])]
        tokens, weights = corpus.draw_windows(random, rows, length)
        loss = mean_loss(model, tokens, weights > random.random(weights.shape))
        loss.backward()
        optimisers.step(options.rate * rate_at(step, share))
        step, num_tokens = step + 1, num_tokens + length * rows
        recent = float(loss.detach()) if step == 1 else 0.95 * recent + 0.05 * float(loss.detach())
        if step % options.report_every == 0:
            _say(f"step {step:5}  {num_tokens / 1e6:6.2f} M tokens  {budget.cpu_seconds():5.0f} CPU-s  "
                 f"{share:4.0%}  loss {recent:.3f}")  # fmt: skip
        if step % options.save_every == 0:
            save_model(model, options.out)
            _say(f"step {step:5}  validation loss {validation_loss(model, held_out):.4f}")
    save_model(model, options.out)
    _say(f"done: {step} steps, {num_tokens:,} tokens, {budget.cpu_seconds():.0f} CPU-s, "
         f"validation loss {validation_loss(model, held_out):.4f}")  # fmt: skip


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    train(parse_options(sys.argv[1:]))
