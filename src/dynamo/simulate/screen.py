"""What a person sees of a simulation: a bar while it runs, and a table. The only door to rich."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box, console, progress, table

from dynamo.simulate.results import Summary
from dynamo.simulate.routing import OnProgress

# TTFT: mean; cached: share of prompt tokens; balance: work of the busiest worker over the mean; queue: most that
# waited in the router; speed: simulated over real time
COLUMNS = (
    "policy", "requests", "TTFT s", "p50", "p99", "max", "cached", "balance", "queue", "speed",
)  # fmt: skip

_WIDTH = 100  # where there is no terminal


def cells(summary: Summary) -> tuple[str, ...]:
    """A line of the table, under `COLUMNS`."""
    return (
        summary.policy,
        f"{summary.num_requests:,}",
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
def bar(policy: str, num_requests: int) -> Iterator[OnProgress]:
    """How far the run of a policy is; on a terminal only."""
    with progress.Progress(console=console.Console(stderr=True), transient=True) as shown:
        task = shown.add_task(policy, total=num_requests)
        yield lambda num_done: shown.update(task, completed=num_done)


def show(summaries: Sequence[Summary], caption: str) -> None:
    """The table, to standard output."""
    grid(COLUMNS, [cells(summary) for summary in summaries], caption)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """A table, to standard output; all but the first column are numbers."""
    shown = table.Table(
        caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    console.Console(width=None if sys.stdout.isatty() else _WIDTH).print(shown)
