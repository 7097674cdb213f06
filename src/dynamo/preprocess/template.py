"""Chat templates: from messages to the text that a model was trained to continue. Only this module imports `jinja2`.

A template comes with the model, and is a program; so it runs in jinja's sandbox, sees plain data only, and may write
a bounded amount. What it finds there is what Hugging Face's `apply_chat_template` offers, because that is what its
author tested it with: the same whitespace rules, `raise_exception`, `strftime_now`, `tojson` that escapes nothing, loop
controls, the `generation` tag, and the special tokens by name.

Rendering a short chat took a sixth of a request, most of it beside the template: jinja copies its global variables
through a ChainMap each time, and the sandbox tries each key of a message as an attribute first. Hence `_join`'s own
context, and `_Sandbox.getattr`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from dynamo.base import clock, errors

MAX_PROMPT_CHARS = 32 * 2**20
# All errors of a program: the data of a request can make a template divide by zero.
_RUNTIME_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_DICT_ATTRIBUTES = frozenset(dir(dict))


class ChatTemplate:
    """A model's template, compiled once."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any],
        clock: clock.Clock,
        source_with_tools: str | None = None,
    ) -> None:
        """`source_with_tools` is used when a request brings tools. Raises ConfigError."""
        environment = _environment(clock)
        self._constants = {**environment.globals, **special_tokens, "documents": None}
        self._plain = _compile(environment, source)
        self._with_tools = (
            _compile(environment, source_with_tools) if source_with_tools else self._plain
        )
        self.knows_developer = "developer" in source
        self.variables = _variables(environment, source) | _variables(
            environment, source_with_tools or ""
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. `args` are further variables from the request. Raises InvalidRequest."""
        variables = {
            **self._constants,
            **(args or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._with_tools if tools else self._plain
        try:
            return _join(template, variables)
        except _RUNTIME_ERRORS as error:
            raise errors.InvalidRequest(
                f"messages: the model's chat template cannot take these: {error or type(error).__name__}",
                param="messages",
            ) from error


def _join(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template that sees these variables and no others. Raises OverflowError if the prompt is too long."""
    context = jinja2.runtime.new_context(
        template.environment, template.name, template.blocks, variables, shared=True
    )
    pieces, num_chars = [], 0
    for piece in template.root_render_func(context):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise OverflowError(f"the prompt exceeds {MAX_PROMPT_CHARS} characters")
    return "".join(pieces)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox, faster for `message.content`: a name that is no attribute of dictionaries is a key."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise errors.ConfigError(f"the chat template is no valid template: {error}") from error


def _variables(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Return the variables that the template reads and does not set."""
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _environment(clock: clock.Clock) -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(clock.wall(), tz=UTC).astimezone().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
    return environment


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
