"""The semantic router behind the real Envoy: lost and wrong requests, and the latency beside an empty ext_proc.

Two Envoys stand before one frontend with two simulated models: one asks the router with keyword rules, the other a
server that changes nothing. To the second, requests name the model that the router would choose. Rounds of both are
interleaved.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import systems
from dynamo.gateway import ext_proc_pb2 as messages
from dynamo.gateway import server as ext_proc

ENVOY = Path(__file__).parents[1] / "deploy" / "semantic-router" / "envoy.yaml"
RULES = """
default_model: general
keyword_rules: [{name: code, keywords: [python, "c++", function, compile, bug]}]
decisions:
  - name: code_decision
    rules: {conditions: [{type: keyword, name: code}]}
    modelRefs: [{model: coder}]
    plugins: [{type: system_prompt, configuration: {system_prompt: Write code.}}]
"""
TEXTS = {"coder": "Why has this function a bug?", "general": "How far is the moon?"}
NUM_AT_ONCE = 50
_READY_S = 90.0
_TIMEOUT_S = 60.0
_MAX_BODY = 2**26


class EmptyProcessor:
    """Answers each message of Envoy without a change."""

    async def process(self, message: Any) -> list[Any]:
        """Return the empty answer of the message's kind."""
        kind = message.WhichOneof("request")
        answer = messages.ProcessingResponse()
        getattr(answer, kind).SetInParent()
        return [answer]


async def serve_empty(port: int) -> None:
    """Serve the empty processor until the process is ended."""
    made: Callable[[], Any] = EmptyProcessor
    server = ext_proc.ExtProcServer(made, _MAX_BODY)
    await server.start("127.0.0.1", port)
    await asyncio.Event().wait()


@contextlib.contextmanager
def running_chains() -> Iterator[tuple[str, str]]:
    """Run both chains; yield the address of Envoy with the router, and of the one with the empty processor."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        environ = systems.environment(sys.executable, str(folder / "discovery"))
        environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of the empty processor
        log = stack.enter_context((folder / "log").open("wb"))
        python = [sys.executable, "-m"]
        frontend, router, empty, api, metrics = (systems.free_port() for _ in range(5))
        (folder / "router.yaml").write_text(RULES)
        mocker = [*python, "dynamo.mocker", "--speedup-ratio", "0", "--served-model-name"]
        commands = [
            [*python, "dynamo.frontend", "--http-port", str(frontend)],
            [*mocker, "general"],
            [*mocker, "coder"],
            [*python, "dynamo.semantic_router", "--config", str(folder / "router.yaml"), "--port", str(router),
             "--api-port", str(api), "--metrics-port", str(metrics)],
            [*python, "benchmarks.semantic_envoy", "--empty", str(empty)],
        ]  # fmt: skip
        urls = []
        for number, port in enumerate((router, empty)):
            admin, entry = systems.free_port(), systems.free_port()
            text = ENVOY.read_text()
            for published, own in ((19901, admin), (8801, entry), (50051, port), (8000, frontend)):
                text = text.replace(f"port_value: {published}", f"port_value: {own}")
            path = folder / f"envoy{number}.yaml"
            path.write_text(text)
            envoy = ["-c", str(path), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
            commands.append([*python, "envoy._main", *envoy])
            urls.append(f"http://127.0.0.1:{entry}")
        for command in commands:
            systems.launch(stack, command, environ, log)
        for url, (model, text) in itertools.product(urls, TEXTS.items()):
            await_answer(url, model, text, folder / "log")
        yield urls[0], urls[1]


def await_answer(url: str, model: str, text: str, log: Path) -> None:
    """Return when a chain answers; ends the benchmark with the end of the log if it never does."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=body_of(model, text), timeout=_TIMEOUT_S
            )
            if answer.status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} did not answer within {_READY_S:g} s: {log.read_text()[-1000:]}")


def body_of(model: str, text: str) -> dict[str, Any]:
    """Return the body of a short chat request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}


async def ask(
    url: str, models: Sequence[str], *, is_auto: bool, num_at_once: int
) -> tuple[collections.Counter[str], list[float]]:
    """Ask for each model in turn; return the counts of right, wrong and lost, and the seconds of each."""
    counts: collections.Counter[str] = collections.Counter()
    seconds: list[float] = []
    waiting = iter(list(models))
    limits = httpx.Limits(max_connections=num_at_once, max_keepalive_connections=num_at_once)

    async def work(client: httpx.AsyncClient) -> None:
        for model in waiting:
            start = time.perf_counter()
            try:
                body = body_of("auto" if is_auto else model, TEXTS[model])
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
                found = answer.json()["model"] if answer.status_code == 200 else "lost"
            except httpx.HTTPError:
                found = "lost"
            seconds.append(time.perf_counter() - start)
            counts["right" if found == model else "lost" if found == "lost" else "wrong"] += 1

    async with httpx.AsyncClient(limits=limits, timeout=_TIMEOUT_S) as client:
        await asyncio.gather(*(work(client) for _ in range(num_at_once)))
    return counts, seconds


def measure(num_requests: int, num_rounds: int) -> bool:
    """Print the rows; return whether no request was lost or went to the wrong model."""
    models = [name for name, _ in zip(itertools.cycle(TEXTS), range(num_requests), strict=False)]
    with running_chains() as (routed, empty):
        chains = {"rules": (routed, True), "empty ext_proc": (empty, False)}
        counts, seconds = asyncio.run(ask(routed, models, is_auto=True, num_at_once=NUM_AT_ONCE))
        print(
            f"{num_requests} requests through Envoy, {NUM_AT_ONCE} at once: {counts['right']} right, "
            f"{counts['wrong']} wrong, {counts['lost']} lost, median {statistics.median(seconds) * 1000:.1f} ms"
        )
        for num_at_once in (1, NUM_AT_ONCE):
            medians: dict[str, list[float]] = {name: [] for name in chains}
            for _ in range(num_rounds):
                for name, (url, is_auto) in chains.items():
                    some = models[: max(20, num_requests // 20)]
                    _, seconds = asyncio.run(
                        ask(url, some, is_auto=is_auto, num_at_once=num_at_once)
                    )
                    medians[name].append(statistics.median(seconds) * 1000)
            best = {name: min(values) for name, values in medians.items()}
            shown = ", ".join(f"{name} {value:.2f} ms" for name, value in best.items())
            ratio = best["rules"] / best["empty ext_proc"]
            print(
                f"{num_at_once:>3} at once, best median of {num_rounds} rounds: {shown}, ratio {ratio:.2f} (aim 1.5)"
            )
    return counts["right"] == num_requests


def main() -> int:
    """Measure, or serve the empty processor; return 1 if a request was lost or went to the wrong model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="requests, 50 at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the latency rows")
    parser.add_argument("--empty", type=int, help="serve the empty processor at this port instead")
    options = parser.parse_args()
    if options.empty is not None:
        asyncio.run(serve_empty(options.empty))
        return 0
    return 0 if measure(options.requests, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
