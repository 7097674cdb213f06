"""The sandbox of chat templates: jinja's, with bounds on the steps, the time and the size of what a template computes.

A template is a program that comes with a model, and a model may come from anywhere. Each iteration of a loop and each
call of a macro counts a step, and so does each item that a filter tests or maps; a step looks at the clock now and
then, and a filter always does.

No value is ever large: whatever makes a larger value from smaller ones (repetition, concatenation, padding, formatting,
joining, replacing, lists in lists) is refused before or right after it does. A list counts with all that is in it, as
often as it is in it, so that its text cannot be much longer. The templates of known models do little of that, and
pay for a check only where they do. Nor are there many long values: those that operators, slices, filters and calls
return are summed up, dropped or not. Nothing of it happens before a rendering begins: jinja computes a filter of
constants when it compiles, unless the filter wants the context, as all do here.
"""

import functools
import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_VALUE = 32 * 2**20  # characters of a text, or of the texts in a nested value
MAX_INT_BITS = 4096
MAX_BYTES = 2**29  # of all long values of a rendering together
_LONG = 4096  # characters or items; shorter values are not summed up
_ITEM_BYTES = 64  # of an item that a function made for its list
_ITEM_CHARS = 32  # that an item of a list counts, beside its text
_MAX_ITEMS = MAX_VALUE // _ITEM_CHARS
_MAX_WIDTH = 10_000  # to which a text is padded or indented
_STEPS_PER_LOOK = 64  # at the clock
_CHAIN = 8  # sums in a row that are checked together
_DICT_ATTRIBUTES = frozenset(dir(dict))
_PADDING_FILTERS = ("center", "indent", "batch", "slice")  # may make much of little
_SLOW_FILTERS = ("pprint", "urlize", "wordwrap")  # may take minutes for a long text or list
_FILTERS_OF_ITEMS = ("map", "select", "reject", "selectattr", "rejectattr")
# Filters that take a text apart, some of them into its characters.
_FILTERS_OF_PARTS = frozenset(
    ("batch", "groupby", "join", "list", "slice", "sort", "striptags", "title", "urlencode", "wordcount")
)  # fmt: skip
_PARTS_PER_STEP = 1000  # of what a filter compares with each item
# `encode`: bytes have the methods of texts, and formats, none of them with bounds
_FORBIDDEN = frozenset(("translate", "encode", "to_bytes", "format_map", "fromkeys", "striptags"))
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# in a format: a width of five digits, or from an argument
_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")


class LimitExceeded(Exception):
    """A template would exceed a bound; the message says which one."""


class Budget:
    """The steps, the time and the long values of one rendering."""

    def __init__(self, max_steps: int, max_s: float, now: Callable[[], float]) -> None:
        self._max_steps, self._max_s, self._now = max_steps, max_s, now
        self.num_steps = 0
        self._num_bytes = 0
        self._ends_at = now() + max_s

    def count_step(self) -> bool:
        """Count a step and return True. Raises LimitExceeded."""
        self.num_steps += 1
        if self.num_steps % _STEPS_PER_LOOK:
            return True
        if self.num_steps > self._max_steps:
            raise LimitExceeded(f"it exceeds {self._max_steps} steps")
        return self.look()

    def look(self) -> bool:
        """Look at the clock and return True. Raises LimitExceeded."""
        if self._now() > self._ends_at:
            raise LimitExceeded(f"it exceeds {self._max_s:g} s")
        return True

    def count(self, value: Any, item_bytes: int = 8) -> Any:
        """Return a new value. Raises LimitExceeded if it is too long, or all long ones are too large together."""
        if isinstance(value, str | list | tuple) and len(value) > _LONG:
            check_length(value)
            is_text = isinstance(value, str)
            self._num_bytes += sys.getsizeof(value) if is_text else len(value) * item_bytes
            if self._num_bytes > MAX_BYTES:
                raise LimitExceeded(f"all its values together exceed {MAX_BYTES} bytes")
            self.look()
        return value

    def check_sum(self, total: Any) -> Any:
        """Return a sum of a few values. Raises LimitExceeded if it is too long."""
        if type(total) is str and len(total) <= _LONG:  # nearly always so
            return total
        return self.count(total if type(total) is str else check_parts(total))

    def concat(self, parts: Iterable[str]) -> Any:
        """Return the output of a macro, or texts that are concatenated. Raises LimitExceeded if it is too long."""
        return self.count(join_texts("", list(parts)))


class Context(jinja2.runtime.Context):
    """The variables of one rendering, with its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> jinja2.runtime.Context:  # noqa: A002 (as in jinja)
        """Return a context for a scoped block, with the same budget."""
        context = super().derived(locals)
        assert isinstance(context, Context)
        context.budget = self.budget
        return context


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes code that counts steps, and that calls the sandbox where texts become longer."""

    def visit_ContextReference(
        self, node: jinja2.nodes.ContextReference, frame: jinja2.compiler.Frame
    ) -> None:
        self.write("context.budget.count_step()")

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        node.body.insert(0, jinja2.nodes.ExprStmt(jinja2.nodes.ContextReference()))
        if node.test is not None:
            node.test = jinja2.nodes.And(jinja2.nodes.ContextReference(), node.test)
        super().visit_For(node, frame)

    def macro_body(
        self, node: jinja2.nodes.Macro | jinja2.nodes.CallBlock, frame: jinja2.compiler.Frame
    ) -> tuple[jinja2.compiler.Frame, jinja2.compiler.MacroRef]:
        node.body.insert(0, jinja2.nodes.ExprStmt(jinja2.nodes.ContextReference()))
        return super().macro_body(node, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.budget.concat")

    def signature(
        self,
        node: jinja2.nodes.Call | jinja2.nodes.Filter | jinja2.nodes.Test,
        frame: jinja2.compiler.Frame,
        extra_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if node.dyn_args is not None:
            check = jinja2.nodes.EnvironmentAttribute("check_items")
            node.dyn_args = jinja2.nodes.Call(check, [node.dyn_args], [], None, None)
        super().signature(node, frame, extra_kwargs)

    @jinja2.compiler.optimizeconst
    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        is_slice = isinstance(node.arg, jinja2.nodes.Slice)
        self.write("context.budget.count(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    @jinja2.compiler.optimizeconst
    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:
        operands: list[jinja2.nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, jinja2.nodes.Add) and len(operands) < _CHAIN:
            operands.append(left.right)
            left = left.left
        self.write("context.budget.check_sum(")
        self.visit(left, frame)
        for operand in reversed(operands):
            self.write(" + ")
            self.visit(operand, frame)
        self.write(")")

    @jinja2.compiler.optimizeconst
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("context.budget.concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._visit_checked(node, super().visit_List, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx == "load":
            self._visit_checked(node, super().visit_Tuple, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._visit_checked(node, super().visit_Dict, frame)

    def _visit_checked(
        self,
        node: jinja2.nodes.Literal,
        visit: Callable[[Any, jinja2.compiler.Frame], None],
        frame: jinja2.compiler.Frame,
    ) -> None:
        self.write("environment.check_parts(")
        visit(node, frame)
        self.write(")")


class _Namespace(jinja2.utils.Namespace):
    """A namespace with a text that does not contain its values, which may be namespaces."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox with bounds, and faster for `message.content`: a name that no dictionary has is a key."""

    code_generator_class = _CodeGenerator
    context_class = Context
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` are further ones, or take the place of jinja's."""
        super().__init__(**options)
        del self.globals["lipsum"]  # writes as many words as it is told to
        self.globals |= {
            "namespace": _Namespace,
            "dict": lambda *args, **kwargs: check_parts(dict(*args, **kwargs)),
        }
        self.filters |= {name: _checked(self.filters[name]) for name in _PADDING_FILTERS}
        self.filters |= {name: _checked(self.filters[name], is_slow=True) for name in _SLOW_FILTERS}
        self.filters |= {name: _counted(self.filters[name]) for name in _FILTERS_OF_ITEMS}
        self.filters |= {
            "format": lambda text, *args, **kwargs: self._modulo(str(text), kwargs or args),
            "replace": lambda text, *args: _replace(str(text), *args),
            "join": self._join,
            **filters,
        }
        self.filters = {name: _watched(name, made) for name, made in self.filters.items()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            if isinstance(obj, str) and attribute in _GROWING:
                return functools.partial(_GROWING[attribute], str(obj))
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _FORBIDDEN or (attr in _GROWING and isinstance(obj, str)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the method `format` of a text in the sandbox, unless it may pad by a large width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(form, form.count("{"), (args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            return context.budget.count(self._modulo(left, right))
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                check_int_bits(left.bit_length() * abs(right))
            return left**right
        if isinstance(left, int) and isinstance(right, int):
            check_int_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, str | Sequence) and isinstance(right, int):
            check_length(left, right)
        elif isinstance(right, str | Sequence) and isinstance(left, int):
            check_length(right, left)
        return context.budget.check_sum(left * right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.budget.look()
        return context.budget.count(super().call(context, obj, *args, **kwargs), _ITEM_BYTES)

    def check_items(self, value: Any) -> Any:
        """Return the arguments of a call that stand in a list. Raises LimitExceeded for a long text."""
        return check_items(value)

    @staticmethod
    def check_parts(value: Any) -> Any:
        """Return a literal with what is in it. Raises LimitExceeded if that is too large."""
        return check_parts(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Return the output of a block. Raises LimitExceeded if it is too long."""
        return join_texts("", list(parts))

    def _modulo(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            check_format(left, left.count("%"), right)
        return left % right

    def _join(self, values: Any, d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            values = map(jinja2.filters.make_attrgetter(self, attribute), values)
        return join_texts(str(d), list(map(str, values)))


def _checked(function: Callable[..., Any], *, is_slow: bool = False) -> Callable[..., Any]:
    """Return a filter of jinja's that refuses large arguments, and to write them too often into a text.

    A slow one refuses a large value, too.
    """

    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        check_numbers((value, *arguments) if is_slow else arguments)
        if isinstance(value, str):
            widest = max((_width(each) for each in arguments), default=0)
            check_length("x", len(value) + (value.count("\n") + 1) * widest)
        return function(value, *args, **kwargs)

    return checked


# What a filter of jinja's may want beside its arguments.
_PASSED: Mapping[str, Callable[[Any], Any]] = {
    "context": lambda context: context,
    "eval_context": operator.attrgetter("eval_ctx"),
    "environment": operator.attrgetter("environment"),
}


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that looks at the clock first, and counts what it makes."""
    passed = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    @functools.wraps(function)
    def watched(context: Context, *args: Any, **kwargs: Any) -> Any:
        context.budget.look()
        if name in _FILTERS_OF_PARTS:
            check_items(args[0])
        first = () if passed is None else (_PASSED[passed.name](context),)
        return context.budget.count(function(*first, *args, **kwargs), _ITEM_BYTES)

    return watched


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of jinja's that counts steps for each item, and the size of all that it makes."""

    @jinja2.pass_context
    @functools.wraps(function)
    def counted(context: Context, values: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        num_steps = 1 + count_parts((args, kwargs)) // _PARTS_PER_STEP

        def count_items() -> Iterator[Any]:
            for value in values or ():
                for _ in range(num_steps):
                    context.budget.count_step()
                yield value

        size = 0
        for made in function(context, count_items(), *args, **kwargs):
            size += count_parts(made)
            if size > MAX_VALUE:
                raise LimitExceeded(f"a value of it exceeds {MAX_VALUE} characters")
            yield made

    return counted


def _replace(text: str, old: Any, new: Any, count: int | None = None) -> str:
    old, new, most = str(old), str(new), -1 if count is None else count
    num_found = text.count(old) if most < 0 else min(text.count(old), most)
    check_length("x", len(text) + num_found * len(new))
    return text.replace(old, new, most)


def join_texts(separator: str, texts: Sequence[str]) -> str:
    """Return the texts, joined. Raises LimitExceeded if they are too long."""
    if sum(map(len, texts)) + len(separator) * len(texts) > MAX_VALUE:
        raise LimitExceeded(f"a text of it exceeds {MAX_VALUE} characters")
    return separator.join(texts)


def _pad(name: str) -> Callable[..., str]:
    """Return a method of texts that refuses large widths."""
    method = getattr(str, name)

    def padded(text: str, *args: Any) -> str:
        check_numbers(args)
        padded: str = method(text, *args)
        return padded

    return padded


def _expand_tabs(text: str, tabsize: int = 8) -> str:
    check_numbers((tabsize,))
    check_length("x", len(text) + text.count("\t") * _width(tabsize))
    return text.expandtabs(tabsize)


def _split(name: str) -> Callable[..., Any]:
    """Return a method of texts that makes at most one part more than a list may have."""
    method = getattr(str, name)

    def split(text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        return method(text, sep, maxsplit if 0 <= maxsplit < _MAX_ITEMS else _MAX_ITEMS)

    return split


def _split_lines(text: str, keepends: bool = False) -> list[str]:
    if len(text) > _MAX_ITEMS:
        check_length(range(sum(map(text.count, _LINE_ENDS))))
    return text.splitlines(keepends)


# The methods that make a long text or a long list of a short text.
_GROWING: Mapping[str, Callable[..., Any]] = {
    **{name: _pad(name) for name in ("ljust", "rjust", "center", "zfill")},
    **{name: _split(name) for name in ("split", "rsplit")},
    "splitlines": _split_lines,
    "expandtabs": _expand_tabs,
    "replace": _replace,
    "join": lambda text, parts: join_texts(text, list(check_items(parts))),
}


def check_length(value: Sequence[Any], times: int = 1) -> None:
    """Raise LimitExceeded if the value, repeated so often, is too long."""
    limit = MAX_VALUE if isinstance(value, str) else _MAX_ITEMS
    if len(value) * times > limit:
        kind = "text of it exceeds" if isinstance(value, str) else "list of it exceeds"
        unit = "characters" if isinstance(value, str) else "items"
        raise LimitExceeded(f"a {kind} {limit} {unit}")


def check_int_bits(num_bits: int) -> None:
    """Raise LimitExceeded for a number of so many bits if they are too many."""
    if num_bits > MAX_INT_BITS:
        raise LimitExceeded(f"a number of it exceeds {MAX_INT_BITS} bits")


def check_items(value: Any) -> Any:
    """Return what is taken apart. Raises LimitExceeded for a text of too many characters."""
    if isinstance(value, str):
        check_length(range(len(value)))
    return value


def check_format(form: str, num_fields: int, values: Any) -> None:
    """Raise LimitExceeded for a format that may pad by more than four digits say, or whose text may be too long."""
    if _WIDE.search(form):
        raise LimitExceeded(f"a width of it exceeds {_MAX_WIDTH - 1} characters")
    check_length("x", len(form) + num_fields * (_MAX_WIDTH + count_parts(values)))


def check_numbers(arguments: Sequence[Any]) -> None:
    """Raise LimitExceeded if one of a function's arguments, after the value that it changes, is a large one."""
    for argument in arguments:
        if _width(argument) >= _MAX_WIDTH:
            raise LimitExceeded(f"a width of it exceeds {_MAX_WIDTH - 1} characters")


def _width(argument: Any) -> int:
    return abs(argument) if isinstance(argument, int) else count_parts(argument)


def check_parts(value: Any) -> Any:
    """Return the value. Raises LimitExceeded if it is too large."""
    count_parts(value)
    return value


def count_parts(value: Any) -> int:
    """Return the characters of the texts in a value, and a few more for each item. Raises LimitExceeded."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        parts = itertools.chain(value, value.values())
    elif kind is list or kind is tuple:
        parts = iter(value)
    elif kind is _Namespace:
        raise LimitExceeded("a list of it contains a namespace, which may become large")
    else:  # a range, or what a dictionary contains
        return _ITEM_CHARS * (len(value) if hasattr(kind, "__len__") else 1)
    size = 0
    for part in parts:
        size += _ITEM_CHARS + (len(part) if type(part) is str else count_parts(part))
        if size > MAX_VALUE:
            raise LimitExceeded(f"a value of it exceeds {MAX_VALUE} characters")
    return size
