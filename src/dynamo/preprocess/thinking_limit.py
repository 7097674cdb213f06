"""From a number of tokens that a model may think to what an engine needs to hold it to that.

An engine knows tokens, not texts. So the limit can be held where one token of the model ends a thought, which is so for
all that were trained on such marks.
"""

from collections.abc import Callable

from dynamo.base import errors
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate, openai_chat

PARAM = "nvext.max_thinking_tokens"


def of(
    request: openai_chat.ChatRequest,
    prompt: str,
    form: formats.AnswerFormat,
    id_of: Callable[[str], int | None],
) -> generate.ThinkingLimit | None:
    """None if there is none, or if it cannot be held and need not be. Raises InvalidRequest if it must be."""
    max_tokens = request.extensions.max_thinking_tokens
    if max_tokens is None:
        return None
    marks = form.thought_marks
    close_ids = _known(marks.closes, id_of) if marks is not None else ()
    if marks is None or not close_ids:
        if request.must_limit_thinking:
            raise errors.InvalidRequest(
                f"{PARAM}: no token of this model is known to end a thought; leave it out, got {max_tokens}",
                param=PARAM,
            )
        return None
    return generate.ThinkingLimit(
        max_tokens=max_tokens,
        close_ids=close_ids,
        open_ids=_known(marks.opens, id_of),
        is_open=marks.begins_in(prompt),
    )


def _known(texts: tuple[str, ...], id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    found = map(id_of, texts)
    return tuple(one for one in found if one is not None)
