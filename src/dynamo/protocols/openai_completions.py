"""`POST /v1/completions`: the request, as it came."""

from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode, openai_fields

MAX_ANSWERS = 2048
MAX_BEST_OF = 20
Prompt = str | list[int]


class CompletionRequest(
    openai_fields.GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Text to continue; several prompts are several continuations."""

    prompt: str | list[str | openai_fields.UInt32 | list[openai_fields.UInt32]]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEST_OF)] | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token; None: no log probabilities at all."""
        return self.logprobs

    @property
    def num_drawn(self) -> int:
        return self.best_of or self.num_choices

    @property
    def is_chosen(self) -> bool:
        return self.num_drawn > self.num_choices

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)

    @property
    def is_scored(self) -> bool:
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[Prompt]:
        """One or more prompts, each a text or token ids."""
        if self.extensions.token_data is not None:
            return [self.extensions.token_data]
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # `check` saw to it that all are ids
        return self.prompt  # type: ignore[return-value]  # likewise

    @property
    def prompt_param(self) -> str:
        """What the prompts came in."""
        return "prompt" if self.extensions.token_data is None else "nvext.token_data"

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        super().check()
        if not isinstance(self.prompt, str):
            _check_prompts(self.prompt, self.num_drawn)
            self._check_is_alone(self.prompt)
        if self.is_scored and not self.echo:
            raise errors.InvalidRequest(
                "max_tokens: expected at least 1, got 0; 0 is only allowed with echo",
                param="max_tokens",
            )
        if self.extensions.max_thinking_tokens is not None:
            raise errors.InvalidRequest(
                "nvext.max_thinking_tokens: a completion is all content; only allowed in a chat",
                param="nvext.max_thinking_tokens",
            )
        if self.suffix and self.echo:
            raise errors.InvalidRequest("suffix: not supported together with echo", param="suffix")
        if self.best_of is not None:
            self._check_best_of(self.best_of)

    def _check_is_alone(self, prompt: list[str | int | list[int]]) -> None:
        is_one = len(prompt) == 1 or isinstance(prompt[0], int)
        if self.extensions.token_data is not None and not is_one:
            raise errors.InvalidRequest(
                f"nvext.token_data: it stands for one prompt; got {len(prompt)} in prompt",
                param="nvext.token_data",
            )

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.num_choices:
            raise errors.InvalidRequest(
                f"best_of: expected at least n, which is {self.num_choices}, got {best_of}",
                param="best_of",
            )
        if best_of > self.num_choices and self.stream:
            raise errors.InvalidRequest(
                "best_of: which answers are the best is known at their end; expected n or nothing "
                f"when stream is true, got {best_of}",
                param="best_of",
            )


def _check_prompts(prompt: list[str | int | list[int]], num_drawn: int) -> None:
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise errors.InvalidRequest(
            "prompt: expected a string, or a list of strings, of token ids, or of lists of token ids, got "
            + ("a mixed list" if prompt else "an empty list"),
            param="prompt",
        )
    if kinds != {int} and len(prompt) * num_drawn > MAX_ANSWERS:
        raise errors.InvalidRequest(
            f"prompt: expected at most {MAX_ANSWERS} answers to all prompts together, "
            f"got {len(prompt)} prompts and n (or best_of) of {num_drawn}",
            param="prompt",
        )


_decoder = openai_decode.RequestDecoder(CompletionRequest)


def decode(body: bytes) -> CompletionRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request
