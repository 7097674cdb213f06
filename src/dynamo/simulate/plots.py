"""The plots of a simulation, as PNG files and one HTML page with all of them. The only module that imports matplotlib.

Figures are built as objects, without pyplot's global state and without a display.
"""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import axes, figure

from dynamo.simulate.disagg import Case
from dynamo.simulate.screen import COLUMNS, cells
from dynamo.simulate.simulation import PolicySummary

Plot = Callable[[axes.Axes, Sequence[PolicySummary]], None]
_STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}img{max-width:100%}"


def write_report(summaries: Sequence[PolicySummary], caption: str, directory: Path) -> Path:
    """Write ttft.png, hit_rate.png, balance.png and report.html, which contains them; return the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {
        "ttft": _draw(summaries, _ttft),
        "hit_rate": _draw(summaries, _hit_rate),
        "balance": _draw(summaries, _balance),
    }
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    page = directory / "report.html"
    page.write_text(_page(summaries, caption, list(pictures.values())), "utf-8")
    return page


def write_tiers(cells: Mapping[str, Sequence[float]], caption: str, directory: Path) -> Path:
    """Write tiers.png: the mean time to first token over the rounds, a line for each cell; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    canvas = figure.Figure(figsize=(8, 4), dpi=110, layout="constrained")
    ax = canvas.subplots()
    for name, rounds in cells.items():
        ax.plot(range(len(rounds)), rounds, marker=".", label=name)
    ax.set(xlabel="round", ylabel="seconds to first token", ylim=(0, None))
    ax.set_title(caption, fontsize="small")
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
    _finish(ax)


def _finish(ax: axes.Axes) -> None:
    ax.grid(alpha=0.3)
    # beside the plot: to look for the best place within takes long, and matplotlib warns of it
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _page(summaries: Sequence[PolicySummary], caption: str, pictures: Sequence[bytes]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(summary)) + "</tr>"
        for summary in summaries
    )
    images = "".join(
        f'<p><img alt="plot" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
        for png in pictures
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Routing simulation</title><style>{_STYLE}</style>"
        f"<h1>Routing simulation</h1><p>{html.escape(caption)}</p>"
        f"<table><tr>{head}</tr>{rows}</table>{images}</html>\n"
    )
