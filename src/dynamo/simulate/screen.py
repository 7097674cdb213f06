"""The output of a simulation: a progress bar, a table, and files. The only module that imports rich."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich import box, console, progress, table

from dynamo.base import errors
from dynamo.simulate.routing import OnProgress
from dynamo.simulate.simulation import PolicySummary

# TTFT: mean; cached: share of prompt tokens; balance: work of the busiest worker over the mean; queue: longest queue in
# the router; speed: simulated over real time
COLUMNS = (
    "policy", "req/s", "TTFT s", "p50", "p99", "max", "cached", "balance", "queue", "speed",
)  # fmt: skip

_WIDTH = 100  # where there is no terminal


class TableText(NamedTuple):
    """A table as it is printed."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def cells(summary: PolicySummary) -> tuple[str, ...]:
    """Return a row of the table with `COLUMNS`."""
    return (
        summary.policy,
        f"{summary.requests_per_s:.1f}",
        f"{summary.mean_ttft:.3f}",
        f"{summary.p50_ttft:.3f}",
        f"{summary.p99_ttft:.3f}",
        f"{summary.max_ttft:.2f}",
        f"{summary.hit_rate:.1%}",
        f"{summary.imbalance:.2f}",
        f"{summary.max_waiting}",
        f"{summary.simulated_s / max(1e-9, summary.elapsed_s):,.0f} x",
    )


@contextmanager
def progress_bar(policy: str, num_requests: int) -> Iterator[OnProgress]:
    """Show the progress of a policy's run, on a terminal only."""
    terminal = console.Console(stderr=True)
    is_hidden = not terminal.is_terminal
    with progress.Progress(console=terminal, transient=True, disable=is_hidden) as display:
        task = display.add_task(policy, total=num_requests)
        yield lambda num_done: display.update(task, completed=num_done)


def check_output(flag: str, path: str | None, *, is_directory: bool) -> None:
    """Make sure, before anything is simulated, that an output can be written. Raises ConfigError."""
    if path is None:
        return
    try:
        (Path(path) if is_directory else Path(path).parent).mkdir(parents=True, exist_ok=True)
        if not is_directory:
            Path(path).open("a").close()
    except OSError as error:
        raise errors.ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from error


def write_json(path: str | None, figures: Any) -> None:
    """Write figures as JSON, if there is a file for them. Raises ConfigError, such as for a full disk."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1)
    try:
        Path(path).write_bytes(text + b"\n")
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def print_summaries(summaries: Sequence[PolicySummary], caption: str) -> None:
    """Print a table with a row for each policy."""
    print_table(COLUMNS, [cells(summary) for summary in summaries], caption)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """Print a table to standard output, each figure whole; all columns but the first are numbers."""
    grid = table.Table(
        caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    terminal = console.Console(width=None if sys.stdout.isatty() else _WIDTH)
    unbounded = terminal.options.update(max_width=10_000)
    terminal.width = max(terminal.width, terminal.measure(grid, options=unbounded).maximum)
    terminal.print(grid)
