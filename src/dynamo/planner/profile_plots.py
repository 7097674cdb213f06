"""The plots of a profile: the only module of the planner that imports matplotlib."""

from pathlib import Path

from matplotlib import figure, ticker

from dynamo.planner.profile import WorkerProfile


def draw(profile: WorkerProfile, path: Path, *, ttft_ms: float, itl_ms: float) -> None:
    """Write a PNG file with the prefill curve and the decode curves, and the targets as lines."""
    canvas = figure.Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    prefill, decode = canvas.subplots(1, 2)
    curve = profile.prefill
    prefill.plot(curve.isl, [s * 1e3 for s in curve.ttft_s], marker=".")
    prefill.axhline(ttft_ms, color="grey", linewidth=0.8, label="target")
    prefill.set(
        xscale="log", yscale="log", xlabel="prompt tokens", ylabel="TTFT on an idle worker, ms"
    )
    for axis in (prefill.xaxis, prefill.yaxis):  # 200, not 2 × 10²
        axis.set_major_formatter(ticker.LogFormatter())
        axis.set_minor_formatter(ticker.LogFormatter())
    for context in sorted({point.context for point in profile.decode.points}):
        points = [point for point in profile.decode.points if point.context == context]
        usage, itl = [100 * p.kv_usage for p in points], [1e3 * p.itl_s for p in points]
        decode.plot(usage, itl, marker=".", label=f"context {context:.0f}")
    decode.axhline(itl_ms, color="grey", linewidth=0.8, label="target")
    decode.set(xlabel="KV cache in use, %", ylabel="time between tokens, ms", ylim=(0, None))
    for ax in (prefill, decode):
        ax.legend(fontsize="small", loc="upper left")  # times rise to the right
        ax.grid(alpha=0.3)
    canvas.savefig(path, format="png")
