"""How hard a model shall think: from OpenAI's `reasoning_effort` to the variables that its chat template knows.

There are two habits. Templates of Qwen3, GLM or DeepSeek-V3.1 have a switch; that of gpt-oss writes the effort down. A
template that knows neither cannot be told, and a caller who asks it to is told so.
"""

from collections.abc import Set
from typing import Any

from dynamo.base import errors

EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
NONE = "none"  # the effort that asks for no thoughts


def template_args(
    effort: str, variables: Set[str], *, can_think: bool, param: str
) -> dict[str, Any]:
    """What to tell a template that reads these variables. Raises InvalidRequest."""
    args: dict[str, Any] = {name: effort != NONE for name in SWITCHES if name in variables}
    if EFFORT in variables and effort != NONE:
        args[EFFORT] = effort
    if not args and (effort != NONE or can_think):
        raise errors.InvalidRequest(
            f"{param}: the chat template of this model cannot be told "
            + ("not to think" if effort == NONE else "how hard to think")
            + f"; leave it out, got {effort!r}",
            param=param,
        )
    return args
