"""The request of `POST /v1/completions`."""

from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.preprocess import inputs
from dynamo.runtime.http import json_body

MAX_ANSWERS = 2048  # to all prompts of a request together
MAX_BEST_OF = 20


class CompletionRequest(
    inputs.GenerationInput, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Text to continue; several prompts are several continuations."""

    prompt: str | list[str | inputs.UInt32 | list[inputs.UInt32]]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEST_OF)] | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_drawn(self) -> int:
        return self.best_of or self.num_choices

    @property
    def is_best_of(self) -> bool:
        return self.num_drawn > self.num_choices

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)

    @property
    def is_scored(self) -> bool:
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[inputs.Prompt]:
        """One or more prompts, each a text or token ids."""
        if self.extensions.token_data is not None:
            return [self.extensions.token_data]
        return split_prompts(self.prompt)

    @property
    def prompt_param(self) -> str:
        """The name of the field that holds the prompts."""
        return "prompt" if self.extensions.token_data is None else "nvext.token_data"

    def check(self) -> None:
        super().check()
        if not isinstance(self.prompt, str):
            self._check_prompts(self.prompt)
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

    def _check_prompts(self, prompt: list[str | int | list[int]]) -> None:
        check_one_kind(prompt, "prompt")
        is_single = len(prompt) == 1 or isinstance(prompt[0], int)
        if not isinstance(prompt[0], int) and len(prompt) * self.num_drawn > MAX_ANSWERS:
            raise errors.InvalidRequest(
                f"prompt: expected at most {MAX_ANSWERS} answers to all prompts together, "
                f"got {len(prompt)} prompts and n (or best_of) of {self.num_drawn}",
                param="prompt",
            )
        if self.extensions.token_data is not None and not is_single:
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


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[inputs.Prompt]:
    """Return the prompts in this field, whose kinds `check_one_kind` has checked."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # all are ids
    return prompt  # type: ignore[return-value]  # none is an id


def check_one_kind(prompts: list[str | int | list[int]], param: str) -> None:
    """Raise InvalidRequest, which names `param`, for an empty or a mixed list."""
    if len(set(map(type, prompts))) != 1:
        raise errors.InvalidRequest(
            f"{param}: expected a string, or a list of strings, of token ids, or of lists of token ids, got "
            + ("a mixed list" if prompts else "an empty list"),
            param=param,
        )


_decoder = json_body.RequestDecoder(CompletionRequest)


def decode(body: bytes) -> CompletionRequest:
    """Return the request in this JSON body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request
