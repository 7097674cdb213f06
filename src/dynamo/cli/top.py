"""`dynamo top`: a live table of the models of one frontend, from its metrics.

Rates are those between two readings. Columns: workers that serve the model, requests in flight, tokens per second, time
to the first token in the interval, and the share of prompt tokens that were cached.
"""

import contextlib
import os
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from rich import live, table
from rich import text as rich_text

from dynamo import client
from dynamo.base import config, errors

_READ_S = 5.0
_COUNTS = ("workers", "in flight", "req/s", "tok/s", "TTFT ms", "ITL ms", "cached", "queued")
_COLUMNS = ("model", *_COUNTS)
_WORKERS = "dynamo_frontend_model_workers"
_NO_MODEL = "unknown"  # label of requests that name no model that there is
Samples = Mapping[tuple[str, str], float]  # by metric and model


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Show the load of a frontend's models, live."""

    url: str = config.option("http://127.0.0.1:8000", help="address of the frontend")
    interval: float = config.option(1.0, help="seconds between two readings", least=0.1)
    once: bool = config.option(False, help="print one table of one interval, and end")


def run(options: TopConfig) -> int:
    """Show the table until Ctrl-C. Raises Unavailable if the frontend does not answer."""
    url = check_url(options.url)
    before = read(url)
    with live.Live(auto_refresh=False, transient=False) as display:
        while True:
            began_at = time.monotonic()
            time.sleep(options.interval)
            after = read(url)
            rows = compare(before, after, time.monotonic() - began_at)
            display.update(_table(url, rows), refresh=True)
            before = after
            if options.once:
                break
    if not display.console.is_terminal:
        display.console.print()  # where nothing is drawn anew, the last line has no end
    return 0


def check_url(text: str) -> str:
    """Return the address of a frontend, with http:// if it names no scheme. Raises ConfigError."""
    url = text if "://" in text else f"http://{text}"
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    raise errors.ConfigError(f"--url: expected http://host:port, got {text!r}")


def read(url: str) -> Samples:
    """Return the frontend's samples. Raises Unavailable."""
    try:
        return parse(client.HttpClient(url, timeout_s=_READ_S).read("/metrics"))
    except (errors.DynamoError, ValueError) as error:
        raise errors.Unavailable(describe_no_answer(url, error.__cause__ or error)) from error


def describe_no_answer(url: str, error: BaseException | None) -> str:
    """Return what to do if no frontend answers at this address."""
    cause = getattr(error, "reason", error)  # urllib wraps the system's error
    number = getattr(cause, "errno", None)
    if number is not None and number > 0:
        reason = os.strerror(number)
    else:  # a name that is not found: its number is not the system's
        reason = getattr(cause, "strerror", None) or str(cause)
    return f"no frontend answers at {url} ({reason}): start one with `dynamo serve`, or name its address with --url"


def parse(text: str) -> Samples:
    """Return the samples of an exposition, summed over all labels but the model; processes of a port share workers."""
    samples: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        name, _, remainder = line.partition("{")
        labels, _, value = remainder.rpartition("} ")
        model = labels.partition('model="')[2].partition('"')[0]
        if model and not name.startswith("#") and not name.endswith("_bucket"):
            former, number = samples.get((name, model), 0.0), float(value.partition(" ")[0])
            samples[name, model] = max(former, number) if name == _WORKERS else former + number
    return samples


def compare(before: Samples, after: Samples, elapsed_s: float) -> list[tuple[str, ...]]:
    """Return a row of `_COLUMNS` for each model."""
    rows: list[tuple[str, ...]] = []
    for model in sorted({model for _, model in after}):
        counters = (key for key in before if key[1] == model and key[0].endswith("_total"))
        is_restarted = any(after.get(key, 0.0) < before[key] for key in counters)
        earlier: Samples = {} if is_restarted else before  # a new process counts from zero

        def grown(name: str, model: str = model, earlier: Samples = earlier) -> float:
            key = (f"dynamo_frontend_{name}", model)
            return after.get(key, 0.0) - earlier.get(key, 0.0)

        def mean_ms(name: str, model: str = model) -> str:
            count = grown(f"{name}_count", model)
            return f"{1e3 * grown(f'{name}_sum', model) / count:.1f}" if count else "–"

        num_requests = grown("requests_total")
        if model == _NO_MODEL and not num_requests:
            continue
        prompt_tokens = grown("input_sequence_tokens_sum")
        rows.append(
            (
                model,
                f"{after.get((_WORKERS, model), 0):.0f}",
                f"{after.get(('dynamo_frontend_inflight_requests', model), 0):.0f}",
                f"{num_requests / elapsed_s:.1f}",
                f"{grown('output_tokens_total') / elapsed_s:.1f}",
                mean_ms("time_to_first_token_seconds"),
                mean_ms("inter_token_latency_seconds"),
                f"{grown('cached_tokens_sum') / prompt_tokens:.0%}" if prompt_tokens else "–",
                f"{after.get(('dynamo_frontend_queued_requests', model), 0):.0f}",
            )
        )
    return rows


def _table(url: str, rows: list[tuple[str, ...]]) -> table.Table:
    """Return a table of which 80 columns show all heads whole; a long name takes several lines."""
    title = f"{url}  {time.strftime('%H:%M:%S')}"
    shown = table.Table(title=rich_text.Text(title), box=None, padding=(0, 1, 0, 0))
    for number, name in enumerate(_COLUMNS):
        shown.add_column(name, justify="right" if number else "left", min_width=len(name))
    shown.columns[0].overflow = "fold"
    for row in rows:
        shown.add_row(*map(rich_text.Text, row))  # a name with brackets is no markup
    return shown
