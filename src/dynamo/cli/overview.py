"""The help of `dynamo` itself, in the layout of NVIDIA Dynamo 0.3: boxes of options and commands."""

import shutil
import textwrap
from collections.abc import Mapping

ABOUT = (
    "The Dynamo CLI is a CLI for serving, containerizing, and deploying Dynamo applications.",
    "You use `serve` to run a model or a graph of services locally, `build` and `containerize` to package a graph, and"
    " `deploy` to bring it to a Kubernetes cluster.",
)
_MOST_CHARS, _LEAST_CHARS = 100, 60


def render(options: Mapping[str, str], commands: Mapping[str, str]) -> str:
    """Return the page for a terminal's width."""
    width = max(_LEAST_CHARS, min(_MOST_CHARS, shutil.get_terminal_size().columns))
    about = "\n\n".join(
        textwrap.fill(text, width - 2, initial_indent=" ", subsequent_indent=" ") for text in ABOUT
    )
    boxes = _box("Options", options, width) + _box("Commands", commands, width)
    return f"\n Usage: dynamo [OPTIONS] COMMAND [ARGS]...\n\n{about}\n\n" + "\n".join(boxes)


def _box(title: str, rows: Mapping[str, str], width: int) -> list[str]:
    column = max(map(len, rows)) + 2
    lines = [f"╭─ {title} {'─' * (width - len(title) - 5)}╮"]
    for name, text in rows.items():
        for number, line in enumerate(textwrap.wrap(text, width - column - 4) or [""]):
            lines.append(f"│ {name if number == 0 else '':<{column}}{line:<{width - column - 4}} │")
    return [*lines, f"╰{'─' * (width - 2)}╯"]
