"""`dynamo run in=text`: a conversation in the terminal, with commands.

What the person types goes to the model, except lines that begin with `/`. A question of several lines stands between
three quotation marks, where `/` is no command, or has a backslash at the end of each line but the last. On a terminal
answers are shown as Markdown, with a spinner until the first token and the speed at the end; elsewhere as they are.
"""

import atexit
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich import console, status

from dynamo.base import errors
from dynamo.cli import markdown, session

with contextlib.suppress(ImportError):  # line editing, where the platform has it
    import readline

HELP = "Ctrl-C stops an answer, /help lists the commands, /exit or Ctrl-D leaves."
COMMANDS = """\
/help               this list
/clear              begin anew
/system [TEXT]      show the system message, or set it
/set [NAME [VALUE]] show the options of requests, set one, or unset it:
                    max_tokens, temperature, top_p, seed, stop ...
/model [NAME]       show the model, or go on with another one
/save FILE          write the conversation to a file
/load FILE          go on with the conversation of a file
/exit               leave, as Ctrl-D does
Lines between two lines of \"\"\" are one question, never a command;
lines that end with a backslash are one, too."""
MAX_HISTORY = 1000  # lines
_QUOTES = '"""'
_FIXED_FIELDS = {  # of a request, and what a person does instead
    "model": "use /model",
    "messages": "type them, or use /load",
    "n": "one answer is shown",
    "stream": "answers are shown as they come",
}
OpenModel = Callable[[str], session.Session]


class SavedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in a file."""

    model: str
    messages: list[dict[str, Any]]
    options: dict[str, Any] = {}


class AnswerView:
    """What a person sees of one answer."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._has_styles = self._is_terminal and not is_plain
        width = _columns()
        self._writer = markdown.MarkdownWriter(width, has_styles=self._has_styles)
        self._thoughts = markdown.MarkdownWriter(width, has_styles=False)
        self._is_thinking = False
        self._spinner = status.Status("", console=console.Console()) if self._is_terminal else None
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        if self._spinner is not None:
            self._spinner.start()

    def show(self, text: str) -> None:
        """Show a piece of the answer."""
        self._begin()
        if self._is_thinking:
            self._is_thinking = False
            self._print(self._dimmed(self._thoughts.finish()) + "\n\n")
        self._print(self._writer.push(text) if self._is_terminal else text)

    def show_thought(self, text: str) -> None:
        """Show a piece of what the model thinks before its answer, on a terminal."""
        if self._is_terminal:
            self._begin()
            self._is_thinking = True
            self._print(self._dimmed(self._thoughts.push(text)))

    def _begin(self) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
            self._stop_spinner()

    def _dimmed(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._has_styles and text else text

    def end(self, answer: session.Answer | None = None) -> None:
        """Show what was held back, and how quick the answer was; None: it was stopped or failed."""
        self._stop_spinner()
        if self._is_thinking:
            self._print(self._dimmed(self._thoughts.finish()))
        self._print(self._writer.finish() + "\n")
        if answer is None or not self._is_terminal or self._first_at is None:
            return
        generated_s = time.monotonic() - self._first_at
        speed = ""
        if answer.completion_tokens > 1 and generated_s > 0:
            speed = f"{(answer.completion_tokens - 1) / generated_s:.1f} tokens/s, "
        first_s = self._first_at - self._began_at
        line = f"({answer.completion_tokens} tokens, {speed}first after {first_s:.2f} s)"
        self._print(self._dimmed(line) + "\n")

    def _stop_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class TerminalConversation:
    """The conversation of one person with a model, which `open_model` replaces."""

    def __init__(
        self,
        loop: session.BackgroundLoop,
        talk: session.Session,
        options: dict[str, Any],
        open_model: OpenModel | None = None,
    ) -> None:
        self._loop = loop
        self._talk = talk
        self._options = dict(options)
        self._open_model = open_model
        self._messages: list[session.Message] = []

    def run(self) -> None:
        """Answer what the person types until they leave."""
        _say(f"{self._talk.model}. {HELP}")
        _keep_history()
        while True:
            try:
                text, is_quoted = read_question()
                text.encode()  # some locales let bytes pass that are no UTF-8
            except (EOFError, RuntimeError):  # the latter: there is no standard input at all
                print()
                return
            except (KeyboardInterrupt, UnicodeError) as error:
                is_text = isinstance(error, KeyboardInterrupt)
                _say(f"\n{HELP}" if is_text else f"(expected text in UTF-8: {error})")
                continue
            is_command = text.startswith("/") and not is_quoted
            if is_command and text == "/exit":
                return
            try:
                if is_command:
                    self._execute(*text.split(maxsplit=1))
                elif text:
                    self._take_turn(text)
            except KeyboardInterrupt:
                print("\n(stopped)")
            except OSError as error:
                _say(f"({text}: {error.strerror or error})")
            except errors.DynamoError as error:
                _say(f"({error})" if is_command else f"(no answer: {error})")

    def _take_turn(self, text: str) -> None:
        """Answer one question; add both to the conversation unless the answer was interrupted or failed."""
        conversation = [*self._messages, {"role": "user", "content": text}]
        view, answer = AnswerView(), None
        try:
            answering = self._talk.chat(conversation, view.show, view.show_thought, **self._options)
            answer = self._loop.call(answering)
        finally:
            view.end(answer)
        self._messages = [*conversation, answer.message]

    def _execute(self, name: str, rest: str = "") -> None:
        """Execute a command. Raises InvalidRequest for an unknown one."""
        commands = {
            "/help": lambda _: _say(COMMANDS),
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set_option,
            "/model": self._set_model,
            "/save": self._save,
            "/load": self._load,
        }
        if name not in commands:
            raise errors.InvalidRequest(f"{name}: expected one of {', '.join(commands)}, /exit")
        commands[name](rest.strip())

    def _clear(self, _: str) -> None:
        self._messages = [message for message in self._messages[:1] if message["role"] == "system"]

    def _set_system(self, text: str) -> None:
        has_system = bool(self._messages) and self._messages[0]["role"] == "system"
        if not text:
            _say(self._messages[0]["content"] if has_system else "(no system message)")
            return
        others = self._messages[1:] if has_system else self._messages
        self._messages = [{"role": "system", "content": text}, *others]

    def _set_option(self, assignment: str) -> None:
        name, _, text = assignment.partition(" ")
        if name in _FIXED_FIELDS:
            raise errors.InvalidRequest(f"/set {name}: {_FIXED_FIELDS[name]}")
        if not name:
            lines = [f"{key} {json.dumps(value)}" for key, value in self._options.items()]
            _say("\n".join(lines) or "(no option is set: the model's own hold)")
        elif not text:
            self._options.pop(name, None)
        else:
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            options = {**self._options, name: value}
            self._talk.check(options)
            self._options = options

    def _set_model(self, name: str) -> None:
        if not name:
            print(self._talk.model)
        elif self._open_model is None:
            raise errors.InvalidRequest(
                f"/model {name}: the workers are another process's: expected /model"
            )
        else:
            self._talk = self._open_model(name)
            print(f"{self._talk.model}, with the same conversation")

    def _save(self, path: str) -> None:
        saved = SavedConversation(
            model=self._talk.model,
            messages=[dict(message) for message in self._messages],
            options=self._options,
        )
        data = msgspec.json.format(msgspec.json.encode(saved), indent=2)
        _path_of(path, "/save").write_bytes(data + b"\n")
        print(f"{len(self._messages)} messages in {path}")

    def _load(self, path: str) -> None:
        try:
            data = _path_of(path, "/load").read_bytes()
            saved = msgspec.json.decode(data, type=SavedConversation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"/load {path}: expected a file of /save: {error}"
            raise errors.InvalidRequest(message) from error
        has_any = {"messages": saved.messages} if saved.messages else {}
        self._talk.check({**saved.options, **has_any})
        self._messages, self._options = [*saved.messages], saved.options
        print(f"{len(self._messages)} messages from {path}")


def _columns() -> int:
    """Return the columns of the terminal, as good as infinite where the output is none."""
    has_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if has_terminal else 2**31


def _say(text: str) -> None:
    """Print a text that is no answer, in lines that break between words."""
    writer = markdown.MarkdownWriter(_columns(), has_styles=False)
    print(writer.push(text) + writer.finish())


def read_question() -> tuple[str, bool]:
    """Read a question from the person, which may have several lines, and whether it stood in quotation marks."""
    line = input("> ").strip()
    lines = []
    if line.startswith(_QUOTES):
        line = line.removeprefix(_QUOTES)
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = input("... ")
        return "\n".join([*lines, line.rstrip().removesuffix(_QUOTES)]).strip(), True
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = input("... ")
    return "\n".join([*lines, line]), False


def _path_of(text: str, command: str) -> Path:
    if not text:
        raise errors.InvalidRequest(f"{command}: expected the name of a file")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise errors.InvalidRequest(
            f"{command} {text}: {text.partition('/')[0]} is no user's home"
        ) from error


def _keep_history() -> None:
    """Read what was typed in earlier conversations, and write it at the end, for this user only."""
    if "readline" not in globals() or not (sys.stdin and sys.stdin.isatty()):
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        path = Path(state).expanduser() / "dynamo" / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
        readline.set_history_length(MAX_HISTORY)
        atexit.register(_write_history, path, readline.get_current_history_length())


def _write_history(path: Path, num_read: int) -> None:
    """Add what was typed after `num_read` lines, behind what conversations in other windows have written."""
    with contextlib.suppress(OSError):
        path.touch(mode=0o600)
        if hasattr(readline, "append_history_file"):
            readline.append_history_file(readline.get_current_history_length() - num_read, path)
        else:  # libedit
            readline.write_history_file(path)
