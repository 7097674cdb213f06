"""`dynamo bench`: streams chats to a frontend, and reports times and rates for people.

Requests keep a number in flight (`--concurrency`) or arrive at a rate (`--rate`, exponential gaps); the seed makes a
run repeatable. Prompts are different random words, so that no prefix cache answers for the engine; `--prompt` sends one
text. Every ten seconds it says how far it is; Ctrl-C ends the load, and what has been answered is reported.
"""

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo import client
from dynamo.base import clock as clocks
from dynamo.base import config, errors
from dynamo.cli import top, waiting
from dynamo.runtime.http import client as http_client

_WORDS = ("brave", "cat", "river", "stone", "light", "garden", "winter", "letter", "wind", "quiet")
_REQUEST_S = 600.0
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Load a frontend and report its times."""

    url: str = config.option("http://127.0.0.1:8000", help="address of the frontend")
    api_key: str = config.option("", env="DYN_API_KEY", help="API key, where one is wanted")
    model: str | None = config.option(
        None, help="model (default: the first that the frontend lists)"
    )
    requests: int = config.option(64, help="requests in all", least=1)
    concurrency: int = config.option(8, help="requests in flight", least=1)
    rate: float = config.option(
        0.0, help="requests per second instead of --concurrency; 0: off", least=0
    )
    input_words: int = config.option(100, help="words of each prompt", least=1)
    max_tokens: int = config.option(64, help="tokens of each answer", least=1)
    prompt: str | None = config.option(None, help="send this text instead of random words")
    seed: int = config.option(0, help="seed of the random prompts and arrivals")
    json: bool = config.option(False, help="print the report as JSON")


@dataclass(frozen=True, slots=True)
class Answered:
    """The times of one answer's chunks, in seconds, and its tokens; `error` says why there is none."""

    sent_at: float
    chunk_times: tuple[float, ...] = ()
    num_tokens: int = 0
    error: str = ""


def run(options: BenchConfig) -> int:
    """Run the load, print the report and return 1 if a request failed. Raises DynamoError, also if all failed."""
    clock = clocks.SystemClock()
    began_at = clock.now()
    answers: list[Answered] = []
    exit_code = 0
    describe = lambda: f"{len(answers)} of {options.requests} requests have ended"  # noqa: E731
    try:
        with waiting.say_regularly(describe):
            asyncio.run(_run(options, clock, answers))
    except KeyboardInterrupt:
        exit_code = _INTERRUPTED
        print(file=sys.stderr)  # after ^C
    report = summarize(answers, clock.now() - began_at)
    if answers and report["failed"] == len(answers) and not (options.json or exit_code):
        # no figures: all would be 0
        raise errors.Unavailable(f"all {len(answers)} requests failed: {report['first_error']}")
    print(msgspec.json.encode(report).decode() if options.json else render(report))
    return exit_code or (1 if report["failed"] else 0)


async def _run(options: BenchConfig, clock: clocks.Clock, answers: list[Answered]) -> None:
    """Send the requests, and append each answer as it ends."""
    draw = random.Random(options.seed)
    url = top.check_url(options.url)
    chats = _ChatClient(url, options.api_key, clock)
    model = options.model or _first_model(url, options.api_key)
    slots = asyncio.Semaphore(options.requests if options.rate else options.concurrency)

    async def ask(prompt: str) -> None:
        async with slots:
            answers.append(await chats.stream(model, prompt, options.max_tokens))

    async with asyncio.TaskGroup() as group:
        for number in range(options.requests):
            if options.rate and number:
                await clock.sleep(draw.expovariate(options.rate))
            words = " ".join(draw.choices(_WORDS, k=options.input_words))
            prompt = options.prompt if options.prompt is not None else words
            group.create_task(ask(prompt))


def _first_model(url: str, api_key: str) -> str:
    try:
        models = client.Client(url, api_key=api_key).list_models()
    except errors.Unavailable as error:
        raise errors.Unavailable(top.describe_no_answer(url, error.__cause__)) from error
    if not models:
        raise errors.Unavailable("the frontend lists no model yet")
    return models[0].id


class _Usage(msgspec.Struct):
    completion_tokens: int


class _LastChunk(msgspec.Struct):
    usage: _Usage | None = None


class _ChatClient:
    def __init__(self, url: str, api_key: str, clock: clocks.Clock) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._clock = clock

    async def stream(self, model: str, prompt: str, max_tokens: int) -> Answered:
        """Return the times of one answer."""
        body = msgspec.json.encode(
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        sent_at, num_tokens = self._clock.now(), 0
        times: list[float] = []
        url = f"{self._url}/v1/chat/completions"
        answer = http_client.open_response("POST", url, body, headers=self._headers)
        try:
            async with self._clock.timeout(_REQUEST_S), answer as response:
                if response.status != 200:
                    refusal = client.read_refusal(await response.body.read())
                    raise errors.Unavailable(f"{response.status}: {refusal}")
                async for line in response.body:
                    if not line.startswith(b"data: {"):
                        continue
                    if b'"error"' in line[:20]:
                        raise errors.Unavailable(client.read_refusal(line[6:]))
                    if b'"choices":[]' in line:
                        usage = msgspec.json.decode(line[6:], type=_LastChunk).usage
                        num_tokens = usage.completion_tokens if usage else 0
                    elif not times or b'"delta":{}' not in line:  # which only ends it
                        times.append(self._clock.now())
        except TimeoutError:
            return Answered(sent_at, error=f"no answer within {_REQUEST_S:g} s")
        except OSError as error:
            return Answered(sent_at, error=top.describe_no_answer(self._url, error))
        except (ValueError, errors.DynamoError, msgspec.MsgspecError) as error:
            return Answered(sent_at, error=str(error) or type(error).__name__)
        return Answered(
            sent_at, tuple(times), num_tokens, "" if times else "an answer without tokens"
        )


Report = dict[str, float | int | str]


def summarize(answers: Sequence[Answered], elapsed_s: float) -> Report:
    """Return the figures of a run: milliseconds, and events per second."""
    good = [answer for answer in answers if not answer.error]
    firsts = [1e3 * (answer.chunk_times[0] - answer.sent_at) for answer in good]
    gaps = [
        1e3 * (after - before)
        for answer in good
        for before, after in zip(answer.chunk_times, answer.chunk_times[1:], strict=False)
    ]
    wholes = [1e3 * (answer.chunk_times[-1] - answer.sent_at) for answer in good]
    report: Report = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "first_error": next((answer.error for answer in answers if answer.error), ""),
        "elapsed_s": round(elapsed_s, 3),
        "requests_per_s": round(len(good) / elapsed_s, 2),
        "tokens_per_s": round(sum(answer.num_tokens for answer in good) / elapsed_s, 1),
        "chunks_per_s": round(sum(len(answer.chunk_times) for answer in good) / elapsed_s, 1),
    }
    for name, values in (("ttft_ms", firsts), ("itl_ms", gaps), ("whole_ms", wholes)):
        for label, value in _percentiles(values).items():
            report[f"{name}_{label}"] = round(value, 2)
    return report


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), values[0] if values else 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def render(report: Report) -> str:
    """Return the report for people."""
    lines = [
        f"{report['requests']} requests, {report['failed']} failed, in {report['elapsed_s']} s",
        f"{report['requests_per_s']} requests/s, {report['tokens_per_s']} tokens/s"
        f" in {report['chunks_per_s']} chunks/s",
        "",
        f"{'milliseconds':<24} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10}",
    ]
    for name, text in (
        ("ttft_ms", "to the first token"),
        ("itl_ms", "between two chunks"),
        ("whole_ms", "to the end"),
    ):
        figures = [f"{report[f'{name}_{label}']:>10}" for label in ("mean", "p50", "p90", "p99")]
        lines.append(f"{text:<24} {' '.join(figures)}")
    if report["first_error"]:
        lines += ["", f"first error: {report['first_error']}"]
    return "\n".join(lines)
