"""What the way from a body to token ids and back costs, in CPU time: `python -m benchmarks.preprocess [MODEL_DIR]`.

Without a model it trains a byte-level tokenizer of 8,000 tokens on this project's source, with a ChatML template.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dynamo.base import clock
from dynamo.frontend.apis import chat as openai_chat
from dynamo.preprocess import loading, preprocessor
from dynamo.protocols import generate, model_card

REPEATS = 5
ROUNDS = 4000
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = "Tell me a story about a brave cat."
encode = msgspec.msgpack.Encoder().encode


def make_model(directory: Path) -> None:
    """The files of a model that concern text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    source = Path(__file__).parents[1] / "src"
    tokenizer.train([str(path) for path in sorted(source.rglob("*.py"))], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"})
    )


def load(directory: Path) -> preprocessor.Preprocessor:
    """As a frontend does."""
    card = model_card.ModelCard(
        display_name="m", source_path=str(directory), context_length=2**20, kv_cache_block_size=16
    )
    return loading.load_preprocessor(card, clock.SystemClock())


def body_of(text: str) -> bytes:
    """A chat request."""
    message = {"role": "user", "content": text}
    return json.dumps({"model": "m", "messages": [message], "max_tokens": 8}).encode()


def report(name: str, per_round: Callable[[], object], *, rounds: int = ROUNDS) -> None:
    """The best of some repeats, in microseconds a round."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.process_time()
        for _ in range(rounds):
            per_round()
        best = min(best, time.process_time() - begun)
    print(f"{name:44} {best / rounds * 1e6:10.2f} µs")


def measure_request(model: preprocessor.Preprocessor, name: str, text: str, rounds: int) -> None:
    """From a body to the bytes of the internal request."""
    body = body_of(text)
    prepared = asyncio.run(model.prepare_conversation(openai_chat.decode(body), "r"))
    name = f"{name} ({prepared.request.prompt_len} tokens)"

    async def all_rounds() -> None:
        for _ in range(rounds):
            encode((await model.prepare_conversation(openai_chat.decode(body), "r")).request)

    report(f"{name}: read and check JSON", lambda: openai_chat.decode(body), rounds=rounds)
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.process_time()
        asyncio.run(all_rounds())
        best = min(best, time.process_time() - begun)
    print(f"{name + ': all, to bytes':44} {best / rounds * 1e6:10.2f} µs")


def measure_answer(model: preprocessor.Preprocessor) -> None:
    """From an engine's outputs to text, a token at a time."""
    request = asyncio.run(
        model.prepare_conversation(openai_chat.decode(body_of(QUESTION * 50)), "r")
    ).request
    ids = memoryview(request.token_ids).cast("I").tolist()
    outputs = [generate.Output(token_ids=(one,)) for one in ids]
    watched = msgspec.structs.replace(
        request, stop_conditions=generate.StopConditions(stop=("\n\nUser:", "THE END"))
    )
    for name, one in (("plain", request), ("two stop strings", watched)):
        text = model.make_answer_text(one)
        report(
            f"answer, {name}: {len(outputs)} tokens",
            lambda text=text: [text.push(output) for output in outputs],
            rounds=50,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        if len(sys.argv) == 1:
            make_model(directory)
        begun = time.process_time()
        model = load(directory)
        print(f"{'load':44} {(time.process_time() - begun) * 1e6:10.0f} µs")
        measure_request(model, "short chat", QUESTION, ROUNDS)
        measure_request(model, "long chat", QUESTION * 800, 20)
        measure_answer(model)


if __name__ == "__main__":
    main()
