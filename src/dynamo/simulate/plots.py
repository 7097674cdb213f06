"""The plots of a simulation, as PNG files and one HTML page with all of them. The only module that imports matplotlib.

Figures are built as objects, without pyplot's global state and without a display.
"""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import axes, figure

from dynamo.simulate.disagg import Case
from dynamo.simulate.plan_run import PlanResult
from dynamo.simulate.screen import COLUMNS, TableText, cells
from dynamo.simulate.simulation import PolicySummary

Plot = Callable[[axes.Axes, Sequence[PolicySummary]], None]
_STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}img{max-width:100%}"


def write_report(summaries: Sequence[PolicySummary], caption: str, directory: Path) -> Path:
    """Write ttft.png, hit_rate.png, balance.png and report.html, which contains them; return the path of the page.

    Where answers have more than one token there is itl.png, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {
        "ttft": _draw(summaries, _ttft),
        "hit_rate": _draw(summaries, _hit_rate),
        "balance": _draw(summaries, _balance),
    }
    if all(max(summary.curves.itls, default=0.0) > 0 for summary in summaries):
        pictures["itl"] = _draw(summaries, _itl)
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    page = directory / "report.html"
    text = TableText(COLUMNS, [cells(summary) for summary in summaries], caption)
    page.write_text(_page("Routing simulation", text, list(pictures.values())), "utf-8")
    return page


def write_plan(results: Sequence[PlanResult], text: TableText, directory: Path) -> Path:
    """Write cost.png, a picture for each policy, and report.html with the table and all of them; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {"cost": _encode(_cost(results))}
    for result in results:
        name = re.sub(r"[^a-z0-9]+", "-", result.policy.lower())
        pictures[name] = _encode(_over_time(result))
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    page = directory / "report.html"
    page.write_text(_page("Planner simulation", text, list(pictures.values())), "utf-8")
    return page


def _cost(results: Sequence[PlanResult]) -> figure.Figure:
    """Draw what each policy costs, and what it holds for that."""
    canvas = figure.Figure(figsize=(9, 5), dpi=110, layout="constrained")
    ax = canvas.add_subplot()
    for result in results:
        ax.scatter(result.gpu_seconds / 3600, 100 * result.attainment, label=result.policy)
    ax.set(xlabel="GPU hours", ylabel="requests within the targets, %", ylim=(0, 105))
    ax.set_title("Cost and service level")
    _finish(ax)
    return canvas


def _over_time(result: PlanResult) -> figure.Figure:
    """Draw the load, the workers and the service level of one policy over the run; failures are vertical lines."""
    canvas = figure.Figure(figsize=(9, 7), dpi=110, layout="constrained")
    load, workers, service = canvas.subplots(3, 1, sharex=True)
    samples = result.samples
    ends = [sample.at for sample in samples]
    begins = [0.0, *ends[:-1]]
    rates = [
        s.num_requests / (end - begin) for s, begin, end in zip(samples, begins, ends, strict=True)
    ]
    load.step(ends, rates, where="pre", label="arrivals")
    load.set(ylabel="requests/s", ylim=(0, None))
    load.set_title(
        f"{result.policy}: {result.attainment:.1%} within the targets, {result.gpu_seconds:,.0f} GPU s"
    )
    for label, style, numbers in (
        ("prefill", "-", [s.num_prefill for s in samples]),
        ("decode", "-", [s.num_decode for s in samples]),
        ("all that hold a GPU", "--", [s.num_billed for s in samples]),
    ):
        if any(numbers):
            workers.step(ends, numbers, style, where="post", label=label)
    workers.set(ylabel="workers", ylim=(0, None))
    shares = [math.nan if s.attainment is None else 100 * s.attainment for s in samples]
    service.plot(ends, shares, label="by arrival")
    service.set(xlabel="seconds", ylabel="within the targets, %", ylim=(0, 105))
    for ax in (load, workers, service):
        for event in result.events:
            if event.kind != "decision":
                ax.axvline(event.at, color="red", linewidth=0.8, linestyle=":")
        _finish(ax)
    return canvas


def write_tiers(cells: Mapping[str, Sequence[float]], caption: str, directory: Path) -> Path:
    """Write tiers.png: the mean time to first token over the rounds, a line for each cell; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    canvas = figure.Figure(figsize=(8, 4), dpi=110, layout="constrained")
    ax = canvas.subplots()
    for name, rounds in cells.items():
        ax.plot(range(len(rounds)), rounds, marker=".", label=name)
    ax.set(xlabel="round", ylabel="seconds to first token", ylim=(0, None))
    ax.set_title(caption, fontsize="small")
    ax.locator_params(axis="x", integer=True)
    _finish(ax)
    canvas.savefig(directory / "tiers.png", format="png")
    return directory / "tiers.png"


def write_disagg(cases: Sequence[Case], caption: str, directory: Path) -> Path:
    """Write disagg.png: for each number of nodes a plot of the curves and one of the gain; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    canvas = figure.Figure(figsize=(11, 4 * len(cases)), dpi=110, layout="constrained")
    grid = canvas.subplots(len(cases), 2, squeeze=False)
    for case, (curves, gains) in zip(cases, grid, strict=True):
        for name, points in case.points.items():
            per_user, per_gpu = [p.per_user for p in points], [p.per_gpu for p in points]
            curves.plot(per_user, per_gpu, marker=".", label=name)
        curves.set(xlabel="tokens/s of a user", ylabel="tokens/s of a GPU", ylim=(0, None))
        curves.set_title(f"{case.num_nodes} node{'s' if case.num_nodes > 1 else ''}")
        _finish(curves)
        for name, ratios in case.ratios.items():
            gains.plot([r.per_user for r in ratios], [r.ratio for r in ratios], label=name)
        gains.axhline(1, color="grey", linewidth=0.8)
        gains.set(xlabel="tokens/s of a user", ylabel="tokens per GPU, over aggregated")
        gains.set_ylim(0, None)
        _finish(gains)
    canvas.suptitle(caption, fontsize="small")
    canvas.savefig(directory / "disagg.png", format="png")
    return directory / "disagg.png"


def _draw(summaries: Sequence[PolicySummary], plot: Plot) -> bytes:
    canvas = figure.Figure(figsize=(9, 5), dpi=110, layout="constrained")
    plot(canvas.add_subplot(), summaries)
    return _encode(canvas)


def _encode(canvas: figure.Figure) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png")
    return buffer.getvalue()


def _ttft(ax: axes.Axes, summaries: Sequence[PolicySummary]) -> None:
    """Draw the share of requests that had their first token within a time."""
    for summary in summaries:
        ttfts = [max(ttft, 1e-4) for ttft in summary.curves.ttfts]
        shares = [(i + 1) / len(ttfts) for i in range(len(ttfts))]
        ax.plot(ttfts, shares, label=f"{summary.policy}, mean {summary.mean_ttft:.2f} s")
    ax.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    ax.set_title("Time to first token")
    _finish(ax)


def _itl(ax: axes.Axes, summaries: Sequence[PolicySummary]) -> None:
    """Draw the share of answers that had this mean time between two tokens, or a shorter one."""
    for summary in summaries:
        itls = [1e3 * itl for itl in summary.curves.itls]
        shares = [(i + 1) / len(itls) for i in range(len(itls))]
        ax.plot(itls, shares, label=f"{summary.policy}, mean {1e3 * summary.mean_itl:.1f} ms")
    ax.set(xlabel="time between tokens, ms", ylabel="share of answers", ylim=(0, 1))
    ax.set_title("Time between tokens")
    _finish(ax)


def _hit_rate(ax: axes.Axes, summaries: Sequence[PolicySummary]) -> None:
    for summary in summaries:
        times, rates = zip(*summary.curves.hit_rates, strict=True)
        ax.plot(
            times, [100 * rate for rate in rates], label=f"{summary.policy}, {summary.hit_rate:.1%}"
        )
    ax.set(xlabel="arrival, s", ylabel="cached prompt tokens, %", ylim=(0, None))
    ax.set_title("Hit rate over time")
    _finish(ax)


def _balance(ax: axes.Axes, summaries: Sequence[PolicySummary]) -> None:
    for summary in summaries:
        shares = summary.curves.shares
        ax.plot(
            range(1, len(shares) + 1),
            shares,
            marker=".",
            label=f"{summary.policy}, {summary.imbalance:.2f}",
        )
    ax.axhline(1, color="grey", linewidth=0.8)
    ax.set(
        xlabel="worker, the busiest first",
        ylabel="computed prompt tokens over the mean",
        ylim=(0, None),
    )
    ax.set_title("Balance of work")
    ax.locator_params(axis="x", integer=True)
    _finish(ax)


def _finish(ax: axes.Axes) -> None:
    ax.grid(alpha=0.3)
    # beside the plot: to look for the best place within takes long, and matplotlib warns of it
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _page(title: str, text: TableText, pictures: Sequence[bytes]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in text.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in text.rows
    )
    images = "".join(
        f'<p><img alt="plot" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
        for png in pictures
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(text.caption)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{images}</html>\n"
    )
