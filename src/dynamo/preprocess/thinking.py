"""Thinking of reasoning models: how hard a model thinks (`reasoning_effort`), and for how many tokens at most.

Chat templates have two ways to set the effort: Qwen3, GLM and DeepSeek-V3.1 have a switch, gpt-oss reads the effort
itself. A template with neither cannot be controlled, and a request that sets an effort is then refused.

An engine counts tokens, not texts. So a limit can be kept only where a single token of the model ends a thought, which
is true of all models that were trained on such marks.
"""

from collections.abc import Callable, Set
from typing import Any

from dynamo.base import errors
from dynamo.preprocess import inputs
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate

EFFORT = "reasoning_effort"
SWITCH = "enable_thinking"
SWITCHES = (SWITCH, "thinking")
NO_EFFORT = "none"  # the effort that disables thinking
LIMIT_PARAM = "nvext.max_thinking_tokens"


def make_template_args(
    effort: str, variables: Set[str], *, can_think: bool, param: str
) -> dict[str, Any]:
    """Return the values for a template that reads `variables`.

    Raises InvalidRequest, which names `param`, if the template has no variable for the effort.
    """
    args: dict[str, Any] = {name: effort != NO_EFFORT for name in SWITCHES if name in variables}
    if EFFORT in variables and effort != NO_EFFORT:
        args[EFFORT] = effort
    if not args and (effort != NO_EFFORT or can_think):
        raise errors.InvalidRequest(
            f"{param}: the chat template of this model cannot be told "
            + ("not to think" if effort == NO_EFFORT else "how hard to think")
            + f"; leave it out, got {effort!r}",
            param=param,
        )
    return args


def make_limit(
    request: inputs.Conversation,
    prompt: str,
    answer_format: formats.AnswerFormat,
    id_of: Callable[[str], int | None],
) -> generate.ThinkingLimit | None:
    """Return the limit that the engine enforces; None without a limit, or if it cannot be kept and need not be.

    `id_of` maps a mark's text to its token id. Raises InvalidRequest if the limit must be kept and cannot be.
    """
    max_tokens = request.extensions.max_thinking_tokens
    if max_tokens is None:
        return None
    marks = answer_format.thought_marks
    close_ids = _find_ids(marks.closes, id_of) if marks is not None else ()
    if marks is None or not close_ids:
        if request.must_limit_thinking:
            raise errors.InvalidRequest(
                f"{LIMIT_PARAM}: no token of this model is known to end a thought; leave it out, got {max_tokens}",
                param=LIMIT_PARAM,
            )
        return None
    return generate.ThinkingLimit(
        max_tokens=max_tokens,
        close_ids=close_ids,
        open_ids=_find_ids(marks.opens, id_of),
        is_open=marks.begins_in(prompt),
    )


def _find_ids(texts: tuple[str, ...], id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    return tuple(token_id for token_id in map(id_of, texts) if token_id is not None)
