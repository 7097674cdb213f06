"""Chat templates: from messages to the text that a model was trained to continue.

A template comes with the model, and is a program; so it sees plain data only, and `sandbox` bounds its steps, its time
and the size of what it computes. A template that takes more than a few milliseconds is rendered again in a thread, one
rendering at a time, so that the event loop goes on.

What it finds there is what Hugging Face's `apply_chat_template` offers, because that is what its author tested it with:
the same whitespace rules, `raise_exception`, `strftime_now`, `tojson` that escapes nothing, loop controls, the
`generation` tag, and the special tokens by name.

Rendering a short chat took a sixth of a request, most of it beside the template: jinja copies its global variables
through a ChainMap each time, and the sandbox tries each key of a message as an attribute first. Hence `_join`'s own
context, and `Sandbox.getattr`.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from dynamo.base import clock, errors
from dynamo.preprocess import conversation, sandbox

T = TypeVar("T")
MAX_TEMPLATE_CHARS = 2**20
# Of the program that a template becomes: Python compiles it in one go, in some 0.1 s.
MAX_CODE_CHARS = 2**19
MAX_OTHERS = 8  # templates of requests that are kept
MAX_PROMPT_CHARS = 32 * 2**20
MAX_STEPS = 1_000_000
MAX_RENDER_S = 5.0
QUICK_STEPS = 10_000  # on the event loop
QUICK_S = 0.02
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
# And what the compilers of jinja and of Python raise for a template that is nested too deeply.
_LOAD_ERRORS = (*_RUNTIME_ERRORS, SyntaxError)

_THINKING = re.compile(r"""\.thinking\b|[\[(]['"]thinking['"]""")  # of a message
_DEVELOPER = re.compile(r"""['"]developer['"]""")  # the role: other words speak of developers
# A test whether a content is null.
_NULL = re.compile(r"""\bcontent(['"]\s*[\])])?\s*(is(\s+not)?|[!=]=)\s*none\b""", re.IGNORECASE)
_SHORT_IDS = re.compile(r"length\s*(!=|<)\s*9\b")  # of calls, in Mistral's templates
_SAMPLE = "a text to look for in a prompt"
_PART_TYPE = re.compile(r"""\.type\b|\[['"]type['"]\]|['"]type['"]""")  # of the parts of a content


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
        """`source_with_tools` is used when a request brings tools. Raises ConfigError.

        `special_tokens` are variables of any kind, in the place of those that a request does not set.
        """
        environment = _environment(clock)
        self.source = source
        self._clock = clock
        self._special_tokens = special_tokens
        self._others: dict[str, ChatTemplate] = {}  # by their source
        self._now = clock.now
        self._slow_turn = asyncio.Lock()
        self._others_turn = asyncio.Lock()  # of all templates of requests together
        self._is_trusted = True  # as far as to be rendered on the event loop
        self._was_quick = True
        self._constants = {**environment.globals, **special_tokens, "documents": None}
        self._plain = _compile(environment, source)
        self._with_tools = (
            _compile(environment, source_with_tools) if source_with_tools else self._plain
        )
        self.knows_developer = _DEVELOPER.search(source) is not None and (
            self._shows(_SAMPLE, "developer") or not self._shows(_SAMPLE, "system")
        )
        self.needs_parts = (
            _PART_TYPE.search(source) is not None
            and "is string" not in source
            and not self._shows(_SAMPLE)
            and self._shows([{"type": "text", "text": _SAMPLE}])
        )
        sources = (source, source_with_tools or "")
        self.writes_call_ids = "<|tool_call_argument_begin|>" in "".join(sources)  # as Kimi's do
        self.needs_short_ids = _SHORT_IDS.search("\n".join(sources)) is not None
        self.reads_thinking = _THINKING.search("\n".join(sources)) is not None
        self.needs_text_arguments = any(_adds_arguments(environment, each) for each in sources)
        self.reads_null = _NULL.search("\n".join(sources)) is not None and (
            self._takes_call(None) or not self._takes_call("")
        )
        self.needs_single_calls = self._loses_calls()
        self.variables = _variables(environment, source) | _variables(environment, sources[1])

    def _shows(self, content: Any, role: str = "user") -> bool:
        """Return whether the prompt of one message with this content, and a question behind, has the sample text."""
        messages = [{"role": role, "content": content}]
        if role != "user":
            messages.append({"role": "user", "content": "a question"})
        prompt = self._try(self._plain, messages)
        return prompt is not None and _SAMPLE in prompt

    def _takes_call(self, content: str | None) -> bool:
        """Return whether the template takes a call with this content: some test for null, and fail behind the test."""
        return self._try(self._with_tools, self._call_samples(["sample_1"], content)) is not None

    def _loses_calls(self) -> bool:
        """Return whether the template shows one call of a message, but fails with two, or leaves out the second."""
        first, second = names = ["sample_1", "sample_2"]
        empty = None if self.reads_null else ""
        single, both = (
            self._try(self._with_tools, self._call_samples(called, empty)) or ""
            for called in ([first], names)
        )
        return first in single and second not in both

    def _call_samples(self, names: Sequence[str], content: str | None) -> list[dict[str, Any]]:
        """Return a conversation in which these tools are called at once."""
        arguments = "{}" if self.needs_text_arguments else {}
        functions = [{"name": name, "arguments": arguments} for name in names]
        calls = [
            {"id": f"a1b2c3d4{number}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": _SAMPLE} for call in calls
        ]
        return [{"role": "user", "content": _SAMPLE}, answer, *results]

    def _try(self, template: jinja2.Template, messages: list[dict[str, Any]]) -> str | None:
        """Return the prompt of these messages; None if the template fails."""
        prompt = {"messages": messages, "tools": None, "add_generation_prompt": False}
        try:
            budget = sandbox.Budget(QUICK_STEPS, MAX_RENDER_S, self._now)
            return _join(template, {**self._constants, **prompt}, budget)
        except (sandbox.LimitExceeded, *_RUNTIME_ERRORS):
            return None

    async def replaced_by(self, source: str) -> "ChatTemplate":
        """Return the template that a request brings, with this model's special tokens. Raises InvalidRequest."""
        if source not in self._others:
            try:
                other = await _run_in_turn(
                    self._others_turn,
                    lambda: ChatTemplate(
                        source, special_tokens=self._special_tokens, clock=self._clock
                    ),
                )
            except errors.ConfigError as error:
                raise errors.InvalidRequest(str(error), param="chat_template") from error
            other._slow_turn = self._others_turn
            other._is_trusted = False  # one filter of a large list takes a second
            if len(self._others) >= MAX_OTHERS:
                self._others.clear()
            self._others[source] = other
        return self._others[source]

    async def render(
        self,
        messages: list[dict[str, Any]],
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
            try:
                return await self._render_led(template, variables)
            except jinja2.TemplateError:
                led = conversation.lead_with_instructions(messages) or messages
                if (turns := conversation.to_turns(led)) is None:
                    raise
            return await self._render(template, variables | {"messages": turns})
        except (sandbox.LimitExceeded, *_RUNTIME_ERRORS) as error:
            raise errors.InvalidRequest.of_param(
                "messages",
                f"the model's chat template cannot take these: {error or type(error).__name__}",
            ) from error

    async def _render_led(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Return the prompt, with all instructions in front if the template fails or leaves one out where it stands."""
        messages = variables["messages"]
        form = conversation.lead_with_instructions(messages)
        try:
            prompt = await self._render(template, variables)
        except jinja2.TemplateError:
            if form is None:
                raise
        else:
            if form is None or conversation.has_instructions(prompt, messages):
                return prompt
        return await self._render(template, variables | {"messages": form})

    async def _render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        if self._is_trusted and self._was_quick:
            try:
                budget = sandbox.Budget(QUICK_STEPS, QUICK_S, self._now)
                return _join(template, variables, budget)
            except sandbox.LimitExceeded:
                self._was_quick = False
        return await self._render_in_thread(template, variables)

    async def _render_in_thread(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        def render() -> tuple[str, int]:
            budget = sandbox.Budget(MAX_STEPS, MAX_RENDER_S, self._now)
            return _join(template, variables, budget), budget.num_steps

        prompt, num_steps = await _run_in_turn(self._slow_turn, render)
        self._was_quick = num_steps <= QUICK_STEPS
        return prompt


async def _run_in_turn(turn: asyncio.Lock, work: Callable[[], T]) -> T:
    """Return the result of work in a thread. Its turn ends with the work, also if the caller is cancelled.

    Raises Unavailable if there is no thread: no template and no request is to blame for it.
    """
    await turn.acquire()
    try:
        running = _start_in_thread(work)
    except RuntimeError as error:
        turn.release()
        raise errors.Unavailable(
            f"a chat template needs a thread ({error}): allow this process more of them (ulimit -u, pids.max)"
        ) from error
    running.add_done_callback(lambda _: turn.release())
    return await asyncio.shield(running)


def _start_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Begin work in a thread that does not keep the process from ending; return its future result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if future.done():
            return  # the process ends
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again by the future
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="chat template", daemon=True).start()
    return future


def _join(template: jinja2.Template, variables: dict[str, Any], budget: sandbox.Budget) -> str:
    """Render a template that sees these variables and no others. Raises LimitExceeded."""
    context = sandbox.Context(template.environment, variables, template.name, template.blocks)
    context.budget = budget
    try:
        return _join_pieces(template.root_render_func(context), "the prompt")
    finally:
        context.vars.clear()  # a macro refers to the context: all messages would wait for the garbage collector


def _join_pieces(pieces: Iterable[str], name: str) -> str:
    """Return the pieces as one text. Raises LimitExceeded before it is too long."""
    taken, num_chars = [], 0
    for piece in pieces:
        taken.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise sandbox.LimitExceeded(f"{name} exceeds {MAX_PROMPT_CHARS} characters")
    return "".join(taken)


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise errors.ConfigError(
            f"the chat template has {len(source)} characters: expected at most {MAX_TEMPLATE_CHARS}"
        )
    try:
        code = environment.compile(source, raw=True)
        program = compile(code, "<template>", "exec") if len(code) <= MAX_CODE_CHARS else None
    except RecursionError as error:
        raise errors.ConfigError("the chat template is nested too deeply to be compiled") from error
    except _LOAD_ERRORS as error:
        raise errors.ConfigError(f"the chat template is no valid template: {error}") from error
    if program is None:
        raise errors.ConfigError(
            f"the chat template becomes a program of {len(code)} characters: expected at most {MAX_CODE_CHARS}"
        )
    return jinja2.Template.from_code(environment, program, environment.make_globals(None))


def _variables(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Return the variables that the template reads and does not set; it has been compiled."""
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _adds_arguments(environment: jinja2.Environment, source: str) -> bool:
    """Return whether the template adds the arguments of a call to texts, as DeepSeek's do; so they must be a text."""
    sums = environment.parse(source).find_all(jinja2.nodes.Add)
    return any(_is_arguments(term) for each in sums for term in (each.left, each.right))


def _is_arguments(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "arguments"
    key = node.arg if isinstance(node, jinja2.nodes.Getitem) else None
    return isinstance(key, jinja2.nodes.Const) and key.value == "arguments"


def _environment(clock: clock.Clock) -> jinja2.Environment:
    environment = sandbox.Sandbox(
        {"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(clock.wall(), tz=UTC).astimezone().strftime(form)

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
    sandbox.check_numbers((indent, *(separators or ())))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    return _join_pieces(encoder.iterencode(value), "a text of it")  # either may stand at each item


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
