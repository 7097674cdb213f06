"""What a token of a stream costs the frontend without sockets, by what it is: `python -m benchmarks.stream_pieces`.

Outputs of one token each go through the delivery of a streamed chat: detokenizer, parsers, metrics, chunks.
"""

import asyncio
import gc
import json
import tempfile
import time
from pathlib import Path

import tokenizers

from benchmarks import preprocess
from dynamo.base import clock
from dynamo.frontend import metrics
from dynamo.frontend.apis import chat, error_dialects
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.observability import metrics as observed
from dynamo.preprocess import loading, preprocessor
from dynamo.protocols import generate, model_card

REPEATS = 15
STORY = "Once upon a time there was a brave cat who lived in a small village near the sea. " * 30
CALL = {"name": "write_file", "arguments": {"path": "story.txt", "text": STORY}}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}}]
CASES = {
    "plain text": ((), STORY),
    "text where tools are offered": (TOOLS, STORY),
    "arguments of a call": (TOOLS, f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
    "thoughts": ((), f"<think>{STORY}</think>Done."),
}


class Client:
    """A client that takes everything."""

    is_streaming = True

    def on_disconnect(self, callback: object) -> None:
        pass

    def start_stream(self, status: int, **options: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    end = write


def prepare(model: preprocessor.Preprocessor, tools: object) -> delivery.PreparedRequest:
    """A streamed chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    request = chat.decode(json.dumps(body | ({"tools": tools} if tools else {})).encode())
    prompts = asyncio.run(chat.prepare(model, request, "r"))
    answer_identity = sse.Identity(
        request_id="r",
        created=0,
        model="m",
        fingerprint="f",
        text=model.text,
        sampling=prompts[0].request.sampling_options,
        context_length=model.context_length,
        clock=clock.SystemClock(),
    )
    return delivery.PreparedRequest(
        formatter=chat.ChatFormatter(request, answer_identity),
        dialect=error_dialects.OPENAI,
        preparer=model,
        prompts=prompts,
        request=request,
    )


def measure(model: preprocessor.Preprocessor, tools: object, token_ids: list[int]) -> float:
    """Return the CPU µs of a token, the best of some answers."""
    prepared = prepare(model, tools)
    outputs = [generate.Output((token_id,)) for token_id in token_ids]
    families = metrics.FrontendMetrics(observed.Registry("bench"), time.monotonic)
    best = float("inf")
    for _ in range(REPEATS):
        meter = metrics.RequestMeter(families.for_model("m"), "chat_completions", is_stream=True)
        answer = streaming.StreamDelivery(Client(), prepared, meter)
        answer.make_attempts(lambda attempt, error: False)
        gc.collect()
        begun = time.thread_time_ns()
        for output in outputs:
            answer.deliver(output)
        best = min(best, (time.thread_time_ns() - begun) / len(outputs) / 1000)
    return best


def main() -> None:
    gc.disable()
    with tempfile.TemporaryDirectory() as directory:
        preprocess.make_model(Path(directory))
        facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="basic")
        card = model_card.ModelCard(
            display_name="m", source_path=directory, context_length=2**20,
            kv_cache_block_size=16, runtime_config=facts,
        )  # fmt: skip
        model = loading.load_preprocessor(card, clock.SystemClock())
        tokenizer = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
        for name, (tools, text) in CASES.items():
            cost_us = measure(model, tools, tokenizer.encode(text).ids)
            print(f"{name:30} {cost_us:6.2f} µs")


if __name__ == "__main__":
    main()
