"""The built-in model's engine, stepped by the test, for guided answers."""

import pathlib
from typing import NamedTuple

import tokenizers

from dynamo.base import errors
from dynamo.engine.native.assemble import assemble
from dynamo.engine.native.guided_decoding import GrammarBuilder
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate

STORYTELLER = (
    pathlib.Path(__file__).parents[1] / "src" / "dynamo" / "engine" / "native" / "storyteller"
)
EOS = (2, 0)


class Answer(NamedTuple):
    text: str
    end: generate.FinishReason | errors.DynamoError
    token_ids: tuple[int, ...]


class Storyteller:
    """An engine that answers all submitted requests in one batch."""

    def __init__(self) -> None:
        self.parts = assemble(STORYTELLER, NativeConfig(threads=1, num_gpu_blocks_override=2000))
        self.builder = GrammarBuilder(STORYTELLER / "tokenizer.json", self.parts.vocab_size, EOS)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, generate.FinishReason | errors.DynamoError] = {}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ask(
        self,
        request_id: str,
        question: str,
        guided: generate.GuidedDecoding | None = None,
        *,
        stop: generate.StopConditions | None = None,
        **sampling: object,
    ) -> None:
        self.submit(self.request(request_id, question, guided, stop=stop, **sampling))

    def request(
        self,
        request_id: str,
        question: str,
        guided: generate.GuidedDecoding | None = None,
        *,
        stop: generate.StopConditions | None = None,
        **sampling: object,
    ) -> generate.Request:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return generate.Request(
            id=request_id,
            model="storyteller",
            token_ids=blocks.pack(self.ids(prompt)),
            stop_conditions=stop or generate.StopConditions(max_tokens=200),
            sampling_options=generate.SamplingOptions(guided_decoding=guided, **sampling),
            eos_token_ids=EOS,
        )

    def submit(self, request: generate.Request) -> None:
        guided = request.sampling_options.guided_decoding
        grammar = self.builder.build(guided) if guided is not None else None
        self.parts.scheduler.submit(request, grammar)
        self._tokens[request.id] = []

    def answers(self) -> dict[str, Answer]:
        while self.parts.scheduler.has_work:
            self._step()
        told = {
            name: Answer(self.tokenizer.decode(tokens), self._ends[name], tuple(tokens))
            for name, tokens in self._tokens.items()
        }
        self._tokens.clear()
        return told

    def _step(self) -> None:
        chunks = self.parts.scheduler.schedule()
        result = self.parts.scheduler.commit(chunks, self.parts.runner.run(chunks))
        for sequence in result.ended:
            self.parts.runner.forget(sequence)
        for request, output, _ in result.outputs:
            self._tokens[request.id] += output.token_ids
            if output.finish_reason is not None:
                self._ends[request.id] = output.finish_reason
        for request, error in result.failed:
            self._ends[request.id] = error
