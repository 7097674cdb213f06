"""The command `python -m dynamo.profiler`: a sweep of one real worker, its profile, and a recommended deployment.

It starts a frontend and a worker, measures all cells, and all of them again, until its budget ends, and appends each
result to `cells.jsonl`: the next run of the same command goes on there. As soon as there are cells enough for a
recommendation, the profile is written after each one, so that an interrupted sweep leaves it.

A worker that is lost in a cell costs that cell, which the next run tries again; frontend and worker are started anew.
"""

import asyncio
import collections
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import config, errors
from dynamo.launch import allocation, children, guard, supervisor
from dynamo.planner import profile_files, profile_sweep, traffic_source
from dynamo.planner.config import Backend, parse_duration_s
from dynamo.planner.policies import Targets
from dynamo.planner.profile_sweep import Cell, CellResult, EngineSize, ProfileClient
from dynamo.protocols import graph_deployment
from dynamo.runtime import listening

_PROG = "python -m dynamo.profiler"
_MODEL = "profiled"
# of a frontend that asks its clients for TLS or a key, as this one does not
_CLIENT_VARIABLES = (
    "DYN_TLS_CERT_PATH",
    "DYN_TLS_KEY_PATH",
    "DYN_TLS_CLIENT_CA_CERT_PATH",
    "DYN_API_KEYS_FILE",
)
# of a graph; the first one's image serves our own engines, too
_FRAMEWORKS = ("vllm", "sglang", "trtllm")
_MOST_NAME = 40  # characters: names of pods are longer by those of their services
_READY_S = 600.0
_STOP_S = 35.0
_SILENT_S = 60.0  # a worker that answers nothing for so long after a failure is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Measure what one worker can do, write its profile, and recommend a deployment."""

    backend: Backend = config.option(  # noqa: RUF009 (a declaration)
        "mocker", help="engine of the worker"
    )
    model: str | None = config.option(None, help="model directory or hub name")
    worker_flags: str = config.option(
        "", help='more flags for the worker, as one argument: "--max-num-seqs 64"', takes="text"
    )
    isl: int = config.option(3000, help="prompt tokens of the expected request", least=1)
    osl: int = config.option(150, help="tokens of the expected answer", least=2)
    ttft: str = config.option("200", help="target time to first token: milliseconds, or 0.2s")
    itl: str = config.option("20", help="target time between two tokens: milliseconds, or 0.02s")
    budget_minutes: float = config.option(30.0, help="minutes until the sweep ends", least=0.01)
    measurements: int = config.option(
        3,
        help="how often each cell is measured, if the minutes suffice: all, then all again; the median counts",
        least=1,
    )
    workers: int | None = config.option(
        None,
        help="workers of the recommendation (default: as many as fit this machine's GPUs; without any, one, which"
        " takes all cores, or for mocker one for each core)",
        least=1,
    )
    report: Literal["text", "json"] = config.option(
        "text", help="form of the recommendation on standard output; json: one line for programs"
    )
    output: str = config.option("profiling_results", help="directory of profile, plots and results")
    deployment: str | None = config.option(
        None,
        help="file of the recommendation for Kubernetes, a DynamoGraphDeployment (default: deployment.yaml in"
        " the directory of --output)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        settings = config.load(ProfilerConfig, prog=_PROG, argv=argv)
        targets = Targets(
            ttft_s=parse_duration_s(settings.ttft, "--ttft", 10.0),
            itl_s=parse_duration_s(settings.itl, "--itl", 1.0),
        )
        with guard.Guard() as guardian:
            return asyncio.run(_Sweep(settings, targets, guardian).run())
    except errors.DynamoError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    except children.ChildDied as death:
        sys.stderr.write(f"{_PROG}: {death}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Sweep:
    """One run of the command."""

    def __init__(self, settings: ProfilerConfig, targets: Targets, guardian: guard.Guard) -> None:
        self._settings, self._targets, self._guard = settings, targets, guardian
        self._directory = Path(settings.output)
        self._deployment = Path(settings.deployment or self._directory / "deployment.yaml")
        self._cells_file = self._directory / "cells.jsonl"
        _make_folder("--output", self._directory)
        _make_folder("--deployment", self._deployment.parent)
        self._num_gpus = profile_sweep.count_gpus(shlex.split(settings.worker_flags))
        self._results = self._read_results()
        self._clock = clocks.SystemClock()
        self._interruption: signal.Signals | None = None
        self._num_restarts = 0
        self._port = listening.find_free_ports(1)

    async def run(self) -> int:
        """Start the processes, measure, and report; return the exit status. Raises ChildDied or DynamoError."""
        deadline = self._clock.now() + 60 * self._settings.budget_minutes
        pool = supervisor.Supervisor(self._guard, self._clock, _say, stop_timeout_s=_STOP_S)
        sweep = asyncio.current_task()
        assert sweep is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            pool.stop_on([number], functools.partial(self._interrupt, sweep, number))
        try:
            async with pool:
                await self._start(pool)
                await self._measure(pool, await self._read_size(), deadline)
        except asyncio.CancelledError:
            if self._interruption is None:
                raise
            return 128 + self._interruption
        return 0

    def _interrupt(self, sweep: asyncio.Task[object], number: signal.Signals) -> None:
        """Give up the cell that is being measured; the processes are stopped on the way out."""
        self._interruption = number
        num_measured = sum(not result.failure for result in self._results)
        _say(
            f"interrupted by {number.name}: {num_measured} measured cells are kept, and the same command"
            " measures the others; stopping the worker"
        )
        sweep.cancel()

    async def _start(self, pool: supervisor.Supervisor) -> None:
        """Start the frontend and the worker, and wait until the worker is ready."""
        _say(f"starting a {self._settings.backend} worker")
        for spec in self._specs():
            await pool.start(spec)
        try:
            await pool.wait_until(self._is_ready, timeout_s=_READY_S)
        except TimeoutError:
            raise errors.EngineFailed(f"the worker was not ready within {_READY_S:.0f} s") from None

    def _specs(self) -> list[children.ChildSpec]:
        folder = self._guard.make_folder("dynamo-profile-")
        environ = {k: v for k, v in os.environ.items() if k not in _CLIENT_VARIABLES} | {
            "DYN_DISCOVERY_BACKEND": "file",  # apart from a deployment that the environment names
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
        }
        settings = self._settings
        worker = ["--model", settings.model] if settings.model else []
        worker += [*shlex.split(settings.worker_flags), "--model-name", _MODEL]  # which is asked
        argv = {
            "frontend": [
                *("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self._port))
            ],
            "worker": [f"dynamo.{settings.backend}", *worker],
        }
        return [
            children.ChildSpec(name=name, argv=[sys.executable, "-m", *flags], environ=environ)
            for name, flags in argv.items()
        ]

    async def _is_ready(self) -> bool:
        try:
            return (await self._read_metrics()).get("model_total_kv_blocks", 0) > 0
        except errors.Unavailable:
            return False

    async def _read_metrics(self) -> dict[str, float]:
        page = await traffic_source.get(f"http://127.0.0.1:{self._port}/metrics")
        return traffic_source.parse_metrics(page.decode()).get(_MODEL, {})

    async def _read_size(self) -> EngineSize:
        facts = await self._read_metrics()
        num_blocks = int(facts["model_total_kv_blocks"])
        num_kv_tokens = num_blocks * int(facts["model_kv_cache_block_size"])
        return EngineSize(
            num_kv_tokens=num_kv_tokens,
            max_num_seqs=int(facts["model_max_num_seqs"]) or 256,
            context_length=min(int(facts["model_context_length"]) or num_kv_tokens, num_kv_tokens),
            num_gpus=self._num_gpus,
        )

    async def _restart(self, pool: supervisor.Supervisor, loss: str) -> None:
        """Start frontend and worker anew. Raises EngineFailed if that was done too often."""
        while True:
            if self._num_restarts == supervisor.MAX_RESTARTS:
                raise errors.EngineFailed(
                    f"the worker was lost {self._num_restarts + 1} times, so the other cells were not measured;"
                    f" the same command tries them again; at last: {loss}"
                )
            self._num_restarts += 1
            for child in pool.child_by_name.values():
                await child.stop(_STOP_S)
            try:
                await self._start(pool)
            except children.ChildDied as death:
                loss = str(death)
            else:
                return

    async def _measure(
        self, pool: supervisor.Supervisor, size: EngineSize, deadline: float
    ) -> None:
        settings, results = self._settings, self._results
        client = ProfileClient("127.0.0.1", self._port, _MODEL, self._clock)
        cells = profile_sweep.plan_cells(size, settings.isl, settings.osl)
        order = settings.measurements * cells
        measured = collections.Counter(result.cell for result in results)
        num_before = sum(min(measured[cell], settings.measurements) for cell in cells)
        _say(f"{len(order)} measurements of {len(cells)} cells, {num_before} of them made before")
        loss = ""
        for number, cell in enumerate(order, 1):
            if measured[cell]:
                measured[cell] -= 1
                continue
            if profile_sweep.must_fail(cell, results):
                continue
            if self._clock.now() > deadline:
                _say(f"the budget of {settings.budget_minutes:g} minutes is used up")
                break
            if loss:
                await self._restart(pool, loss)
            result = await self._measure_cell(pool, client, cell)
            loss = result.failure if result.is_worker_lost else ""
            results.append(result)
            with _writing(self._directory):
                self._append(result)
            outcome = result.failure or f"{result.seconds * 1e3:.1f} ms"
            _say(
                f"[{number}/{len(order)}] {cell.kind} {cell.concurrency} x {cell.context}: {outcome}"
            )
            profile = profile_sweep.make_profile(results, size)
            if profile and not profile_sweep.find_missing(results, cells, settings.isl):
                with _writing(self._directory):
                    profile_files.write_profile(profile, self._directory)
        if missing := profile_sweep.find_missing(results, cells, settings.isl):
            failures = "; ".join(sorted({r.failure for r in results if r.failure})[:3])
            raise errors.EngineFailed(
                f"there is no recommendation, since the profile lacks {', '.join(missing)}; the same command"
                " measures what is left" + (f"; failures: {failures}" if failures else "")
            )
        self._report(results, size)

    async def _measure_cell(
        self, pool: supervisor.Supervisor, client: ProfileClient, cell: Cell
    ) -> CellResult:
        """Measure a cell. After a failure a short prompt shows whether the worker is lost."""
        try:
            return CellResult(cell=cell, seconds=await client.measure(cell))
        except errors.DynamoError as error:
            failure = str(error) or type(error).__name__
        try:
            await pool.wait_until(client.is_answered, timeout_s=_SILENT_S)
        except children.ChildDied as death:
            return CellResult(cell=cell, failure=str(death), is_worker_lost=True)
        except TimeoutError:
            failure = f"the worker answers no more: {failure}"
            return CellResult(cell=cell, failure=failure, is_worker_lost=True)
        return CellResult(cell=cell, failure=failure)

    @property
    def _fingerprint(self) -> str:
        settings = self._settings
        return f"{settings.backend} {settings.model} {settings.worker_flags}"

    def _read_results(self) -> list[CellResult]:
        """Return the results of earlier runs with the same worker.

        Left out are lines that were cut off, and cells in which the worker was lost.
        """
        results = []
        try:
            lines = self._cells_file.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise errors.ConfigError(f"--output: {error}") from error
        for line in lines:
            try:
                fingerprint, result = msgspec.json.decode(line, type=tuple[str, CellResult])
            except ValueError:  # such as a character that was cut off
                continue
            if fingerprint == self._fingerprint and not result.is_worker_lost:
                results.append(result)
        return results

    def _append(self, result: CellResult) -> None:
        """Append a result on a line of its own, also after one that was cut off. Raises OSError."""
        with self._cells_file.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
            is_cut = file.read(1) not in (b"", b"\n")
            line = msgspec.json.encode([self._fingerprint, result]) + b"\n"
            file.write(b"\n" * is_cut + line)

    def _report(self, results: Sequence[CellResult], size: EngineSize) -> None:
        settings = self._settings
        profile = profile_sweep.make_profile(results, size)
        assert profile is not None, "nothing is missing"
        machine = children.machine_resources(os.environ)
        choice = profile_sweep.recommend(
            profile,
            isl=settings.isl,
            osl=settings.osl,
            targets=self._targets,
            num_workers=settings.workers
            or count_workers(machine, settings.backend, self._num_gpus),
            num_gpus=self._num_gpus,
            context_length=size.context_length,
        )
        text = describe(choice, settings, has_gpus=bool(machine.devices))
        as_json = msgspec.json.encode(choice).decode() + "\n"
        sys.stdout.write(as_json if settings.report == "json" else text)
        sys.stdout.flush()
        file = self._deployment
        with _writing(self._directory):
            (self._directory / "recommendation.txt").write_text(text, "utf-8")
            graph = make_deployment(choice, settings, has_gpus=bool(machine.devices))
            profile_files.write_deployment(graph, text, file)
            if importlib.util.find_spec("matplotlib") is not None:
                plots = importlib.import_module("dynamo.planner.profile_plots")
                ttft_ms, itl_ms = 1e3 * self._targets.ttft_s, 1e3 * self._targets.itl_s
                path = self._directory / "profile.png"
                plots.draw(profile, path, ttft_ms=ttft_ms, itl_ms=itl_ms)
        _say(f"wrote {self._directory}; on Kubernetes: kubectl apply -f {shlex.quote(str(file))}")


def _make_folder(flag: str, folder: Path) -> None:
    """Make a folder for results before anything is measured. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ConfigError(f"{flag} {folder}: cannot be made: {error.strerror}") from error


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise ConfigError for results that cannot be written, such as to a full disk."""
    try:
        yield
    except OSError as error:
        raise errors.ConfigError(
            f"--output {folder}: cannot be written to: {error}; the same command goes on after the cells that are in"
            " cells.jsonl"
        ) from error


def count_workers(machine: allocation.Allocation, backend: str, num_gpus: int) -> int:
    """Return how many workers of `num_gpus` GPUs fit the machine, at least one.

    Without GPUs the worker that was measured had all cores, and a second one would take them from it; simulated
    workers need one core each.
    """
    if machine.devices:
        return max(1, len(machine.devices) // num_gpus)
    return max(1, len(machine.cores) // num_gpus) if backend == "mocker" else 1


def describe(
    choice: profile_sweep.Recommendation, settings: ProfilerConfig, *, has_gpus: bool
) -> str:
    """Return the recommendation as text with a line to paste into a shell; with GPUs, each worker gets its own."""
    num_gpus = choice.gpus_per_worker
    unit = f"GPU, with {num_gpus} GPUs per worker" if num_gpus > 1 else "worker"
    roles = f"--workers {choice.num_decode}"
    roles += f" --prefill {choice.num_prefill}" if choice.num_prefill else ""
    roles += f" --devices-per-worker {num_gpus}" if has_gpus else ""
    flags = f" --worker-flags {shlex.quote(settings.worker_flags)}" if settings.worker_flags else ""
    model = f" {shlex.quote(settings.model)}" if settings.model else ""
    notes = f"cannot be met: {choice.unreachable}\n" if choice.unreachable else ""
    return (
        f"{choice.mode}: {round(choice.requests_per_s, 2):g} requests/s of {settings.isl}+{settings.osl} tokens,"
        f" {round(choice.tokens_per_s_per_gpu, 1):g} output tokens/s per {unit};"
        f" idle worker: TTFT {choice.ttft_ms:.0f} ms, ITL {choice.itl_ms:.1f} ms\n{notes}"
        f"dynamo serve{model} --engine {settings.backend} {roles}{flags}\n"
    )


def make_deployment(
    choice: profile_sweep.Recommendation, settings: ProfilerConfig, *, has_gpus: bool
) -> dict[str, Any]:
    """Return the recommendation as a DynamoGraphDeployment, named after the engine and the model."""
    words = f"{settings.backend} {Path(settings.model or '').name}".lower()
    name = "-".join(re.findall("[a-z0-9]+", words))[:_MOST_NAME].rstrip("-")
    framework = settings.backend if settings.backend in _FRAMEWORKS else _FRAMEWORKS[0]
    worker = graph_deployment.WorkerTemplate(
        engine=settings.backend,
        framework=framework,
        model=settings.model,
        flags=shlex.split(settings.worker_flags),
        has_gpus=has_gpus and settings.backend != "mocker",
    )
    return graph_deployment.make_graph({"name": name}, worker, choice)


def _say(text: str) -> None:
    sys.stderr.write(f"dynamo.profiler: {text}\n")
    sys.stderr.flush()
