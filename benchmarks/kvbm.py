"""What KV cache tiers bring the native engine or vLLM, and what they cost where nothing comes again.

Users resend their conversation turn by turn, in lock step: 256 new tokens, 32 answered. Two engines of one random model
(0.11B parameters, float32; with `--device cuda` 3.8B, bfloat16), without and with tiers, each in a process of its own,
take turns round by round, so that a busy machine is busy for both. Their answers are compared, and on a CPU they must
be equal. The engine's own memory holds a quarter of all that the conversations come to.

conversation   host memory holds the rest: the case that tiers are for
disk           host memory holds an eighth, the disk all
overload       engine and host memory together hold half: blocks leave before they are needed
overload4      they hold a quarter
unique         every prompt is new, so nothing can be loaded
itself         as `conversation`, but both engines are without tiers: the noise of the other cases
short          turns of 16 + 8 tokens, which are computed sooner than loaded
visits         each user's last prompt comes a second time, from each place in turn: the disk, an object store (a
               directory, and S3 as moto plays it), the tier that another worker of the host has filled, and the
               engine's memory of another worker (native engine); beside computing it

`--engine vllm` runs the same over vLLM on a CPU, in its environment.

Times to first token are means over the users of a round, in seconds, on two clocks: the wall's, and the processor time
of the engine's process, which moves little on a busy machine. On the latter a copy beside a step counts as if the step
waited for it, and a wait for a disk does not count; of vLLM, whose model runs in other processes, there is only the
former. Inter-token latency is the mean and the 99th percentile over a whole run.
"""

import argparse
import asyncio
import contextlib
import http.client
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks import random_models
from dynamo.base import clock, errors
from dynamo.disagg import metrics as disagg_metrics
from dynamo.disagg import peer_prefixes
from dynamo.engine import api
from dynamo.engine.native.engine import NativeEngine
from dynamo.engine.native.settings import NativeConfig
from dynamo.observability import metrics
from dynamo.protocols import blocks, generate, kv_events, kv_transfer
from dynamo.runtime import client

BLOCK = 16  # tokens
VOCABULARY = random_models.QWEN3["vocab_size"]
VLLM_BLOCK = 32  # tokens; vLLM's kernels for CPUs want multiples of it
SHORT = (16, 8)  # tokens of a turn and of its answer
SHAPES = {
    "cpu": "qwen3-0.1b",
    "cuda": "qwen3-4b",
}  # on a GPU a small model computes sooner than it loads
CASES = ("conversation", "disk", "overload", "overload4", "unique", "short", "itself", "visits")
# vLLM's scheduler gets the prompts of a round one by one. Whether its first step has one of them or three is chance,
# and changes the mean by a fifth. With a head start of the first, it always has one.
VLLM_HEAD_START_S = 0.1
SOURCES = ("disk", "object store", "S3 (moto)", "other worker", "peer")
BUCKET = "s3://cache"


@dataclass(frozen=True)
class Answered:
    """One answer, with the times of its tokens in seconds after it was asked for."""

    token_ids: list[int]
    times: list[float]
    cpu_times: list[float]


class Watch:
    """A sink that notes each token's time."""

    def __init__(self) -> None:
        self.answers: dict[str, Answered] = {}
        self.ends: dict[str, asyncio.Future[None]] = {}
        self._began_at: dict[str, tuple[float, float]] = {}

    def begin(self, request_id: str) -> asyncio.Future[None]:
        """Note that a request is submitted now."""
        self.answers[request_id] = Answered([], [], [])
        self._began_at[request_id] = time.perf_counter(), time.process_time()
        end = self.ends[request_id] = asyncio.get_running_loop().create_future()
        return end

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """Note tokens."""
        now, cpu_now = time.perf_counter(), time.process_time()
        for request_id, output in batch:
            answer, (began_at, cpu_began_at) = self.answers[request_id], self._began_at[request_id]
            answer.token_ids.extend(output.token_ids)
            answer.times.append(now - began_at)
            answer.cpu_times.append(cpu_now - cpu_began_at)
            if output.finish_reason is not None:
                self.ends[request_id].set_result(None)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Fail the run."""
        self.ends[request_id].set_exception(error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Ignore events."""

    def died(self, error: errors.EngineFailed) -> None:
        """Fail the run."""
        raise error


class PeerPair:
    """Two native engines: the second copies the prefixes of its prompts from the first, by shared memory."""

    capabilities = api.EngineCapabilities()

    def __init__(self, model: Path, num_first: int, options: dict[str, Any]) -> None:
        """The first `num_first` requests go to the first engine."""
        self._num_first = num_first
        self._first, second = (NativeEngine(model, NativeConfig(**options)) for _ in range(2))
        for engine in (self._first, second):
            engine.enable_export()
        self._counts = metrics.Registry("bench")
        self._second = peer_prefixes.PeerPrefixEngine(
            second,
            lambda _: cast(client.EndpointClient, self),
            disagg_metrics.PeerPrefixMetrics(self._counts),
            clock.SystemClock(),
        )
        self._questions: dict[str, Any] = {}  # receivers, by request id

    async def start(self, watch: Watch) -> None:
        """Start both engines."""
        self._watch = watch
        await self._first.start(self)
        await self._second.start(watch)

    def submit(self, request: generate.Request) -> None:
        """Submit to the engine whose turn it is."""
        if self._num_first:
            self._num_first -= 1
            self._first.submit(request)
            return
        assert self._first.transfer_metadata is not None
        source = kv_transfer.PrefixSource(
            endpoint="n/c/e",
            instance_id=1,
            metadata=self._first.transfer_metadata,
            num_tokens=request.prompt_len,
        )
        self._second.submit(msgspec.structs.replace(request, prefix_source=source))

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """Answer questions for leases; pass on the outputs of the first engine."""
        for item in batch:
            if item.request_id in self._questions:
                self._questions.pop(item.request_id).receive(item.output)
            else:
                self._watch.outputs([item])

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Fail the run."""
        raise error

    died = Watch.died
    kv_events = Watch.kv_events

    async def wait_for_instances(self, timeout_s: float) -> None:
        """Return at once: the first engine runs."""

    async def open(self, request: generate.Request, receiver: Any, **_: Any) -> "PeerPair":
        """Ask the first engine for a lease."""
        self._questions[request.id] = receiver
        self._first.submit(request)
        return self

    def cancel(self) -> None:
        """Do nothing: the question is answered."""

    async def stop(self) -> None:
        """Stop both engines."""
        rows = self._counts.render().decode().splitlines()
        print(
            "  peer: "
            + ", ".join(
                row for row in rows if row.startswith("bench_kv_peer_") and "created" not in row
            )
        )
        await self._second.stop()
        await self._first.stop()


def make_engine(model: Path, options: dict[str, Any]) -> Any:
    """Return the native engine, or vLLM if the options have its name, or a pair of native engines."""
    num_first = options.pop("peer_pair", None)
    if num_first is not None:
        del options["engine"]
        return PeerPair(model, num_first, options)
    if options.pop("engine", "native") == "native":
        return NativeEngine(model, NativeConfig(**options))
    from dynamo.engine.adapters.settings import VllmConfig
    from dynamo.engine.adapters.vllm import engine as adapter

    num_tokens = options.pop("num_gpu_blocks_override") * BLOCK
    flags = {
        "block-size": VLLM_BLOCK,
        "num-gpu-blocks-override": num_tokens // VLLM_BLOCK,
        "max-num-seqs": options.pop("max_num_seqs"),
        "dtype": "float32",
        # vLLM refuses a context that its memory could not hold
        "max-model-len": min(
            random_models.QWEN3["max_position_embeddings"],
            (num_tokens // VLLM_BLOCK - 1) * VLLM_BLOCK,
        ),
    }
    del options["block_size"], options["threads"], options["device"]
    connector = (options.pop("connector"),) if "connector" in options else ("none",)
    for name in ("kvbm_cpu_cache_override_num_blocks", "kvbm_disk_cache_override_num_blocks"):
        if name in options:
            options[name] = max(2, options[name] * BLOCK // VLLM_BLOCK)
    engine_args = ["--enforce-eager", "--skip-tokenizer-init"]
    engine_args += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    settings = VllmConfig(engine_args=tuple(engine_args), connector=connector, **options)
    return adapter.build(model, settings, "m")


async def serve(pipe: Connection, model: Path, options: dict[str, Any]) -> None:
    """Answer rounds of prompts until None comes, then report the tiers."""
    head_start_s = VLLM_HEAD_START_S if options.get("engine") == "vllm" else 0.0
    engine, watch = make_engine(model, options), Watch()
    await engine.start(watch)
    pipe.send("ready")
    num_requests = 0
    while (task := await asyncio.to_thread(pipe.recv)) is not None:
        prompts, answer_len = task
        ids = [str(num_requests + i) for i in range(len(prompts))]
        num_requests += len(prompts)
        began_at = time.perf_counter()
        ends = []
        for index, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            if index == 1:
                await asyncio.sleep(head_start_s)
            ends.append(watch.begin(request_id))
            engine.submit(
                generate.Request(
                    id=request_id,
                    model="m",
                    token_ids=blocks.pack(prompt),
                    stop_conditions=generate.StopConditions(max_tokens=answer_len),
                    sampling_options=generate.SamplingOptions(temperature=0.0),
                )
            )
        await asyncio.gather(*ends)
        seconds = time.perf_counter() - began_at
        pipe.send(([watch.answers.pop(request_id) for request_id in ids], seconds))
    reporter = engine.capabilities.kv_tiers
    pipe.send(reporter.report_tiers() if reporter is not None else None)
    await engine.stop()


def run_server(pipe: Connection, model: Path, options: dict[str, Any]) -> None:
    """Run one engine: the child's main function."""
    asyncio.run(serve(pipe, model, options))


class Engine:
    """An engine in a process of its own."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_server, args=(theirs, model, options))
        self._process.start()
        theirs.close()  # so that waiting for a process that died ends
        self._pipe.recv()
        self.ttfts: list[float] = []  # mean of each round
        self.cpu_ttfts: list[float] = []
        self.gaps: list[float] = []
        self.seconds = 0.0
        self.num_tokens = 0

    def answer(self, prompts: list[list[int]], answer_len: int) -> list[list[int]]:
        """Answer a round of prompts."""
        self._pipe.send((prompts, answer_len))
        answers, seconds = self._pipe.recv()
        self.ttfts.append(statistics.fmean(answer.times[0] for answer in answers))
        self.cpu_ttfts.append(statistics.fmean(answer.cpu_times[0] for answer in answers))
        self.gaps += [
            later - earlier
            for answer in answers
            for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        ]
        self.seconds += seconds
        self.num_tokens += sum(len(answer.token_ids) for answer in answers)
        return [answer.token_ids for answer in answers]

    def stop(self) -> Any:
        """End the process and return the report of its tiers."""
        self._pipe.send(None)
        report = self._pipe.recv()
        self._process.join()
        return report


def tier_options(case: str, num_blocks: int, directory: str) -> dict[str, Any]:
    """Return the options of the engine with tiers; `num_blocks` is what the conversations come to."""
    shares = {
        "conversation": 0.8, "disk": 0.125, "overload": 0.25, "overload4": 0.125, "unique": 0.8, "short": 0.8,
    }  # fmt: skip
    options: dict[str, Any] = {
        "connector": "kvbm",
        "kvbm_cpu_cache_override_num_blocks": int(shares[case] * num_blocks),
    }
    if case == "disk":
        options |= {
            "kvbm_nvme_path": directory,
            "kvbm_disk_cache_override_num_blocks": int(1.1 * num_blocks),
        }
    return options


def device_options(args: argparse.Namespace, num_blocks: int) -> dict[str, Any]:
    """Return the options of an engine whose own memory has so many blocks, or as many as two users need."""
    least = 2 * (args.prompt + args.answer) * args.turns // BLOCK
    return {
        "engine": args.engine,
        "block_size": BLOCK,
        "num_gpu_blocks_override": max(num_blocks, least),
        "max_num_seqs": args.users,
        "threads": args.threads,
        "device": args.device,
    }


def bench_visits(model: Path, args: argparse.Namespace) -> None:
    """Ask for long prompts a second time, when only a slow tier has them, and print what came from where."""
    length = (args.prompt + args.answer) * (args.turns - 1) + args.prompt
    per_user = -(-(length + args.answer) // BLOCK)
    options = device_options(args, 2 * per_user)
    draw = random.Random(8)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(args.users)]
    print(f"\nvisits: {args.users} prompts of {length} tokens, one after the other")
    print(
        "  source              s, first and second visit  CPU s, first and second      loaded tokens"
    )
    for source in SOURCES if args.engine == "native" else SOURCES[:-1]:
        with (
            tempfile.TemporaryDirectory(dir=args.disk) as directory,
            contextlib.ExitStack() as stack,
        ):
            tiers: dict[str, Any] = {
                "connector": "kvbm",
                "kvbm_cpu_cache_override_num_blocks": 2 * per_user,
            }
            if source == "disk":
                tiers["kvbm_nvme_path"] = directory
                tiers["kvbm_disk_cache_override_num_blocks"] = 2 * args.users * per_user
            elif source == "object store":
                tiers["kvbm_object_store"] = Path(directory).as_uri()
            elif source == "S3 (moto)":
                if not stack.enter_context(moto_server()):
                    continue
                tiers["kvbm_object_store"] = f"{BUCKET}{directory}"
            elif source == "peer":
                tiers = {
                    "num_gpu_blocks_override": (args.users + 1) * per_user,
                    "peer_pair": len(prompts),
                }
            else:
                tiers["kvbm_cpu_cache_override_num_blocks"] = 3 * args.users * per_user
                tiers |= {"kvbm_sharing_workers": 2, "kvbm_shared_memory_dir": directory}
            first = Engine(model, options | tiers)
            second = Engine(model, options | tiers) if source == "other worker" else first
            said = [first.answer([prompt], args.answer) for prompt in prompts]
            num_first = len(second.ttfts)
            again = [second.answer([prompt], args.answer) for prompt in prompts]
            assert said == again, "the answers differ"
            num_visits = len(prompts)
            clocks = [
                (statistics.fmean(before[:num_visits]), statistics.fmean(after[num_first:]))
                for before, after in (
                    (first.ttfts, second.ttfts),
                    (first.cpu_ttfts, second.cpu_ttfts),
                )
            ]
            reports = [
                engine.stop() for engine in {id(each): each for each in (second, first)}.values()
            ]
            loaded = ""
            if reports[0] is not None:
                loaded = f"   {reports[0].counts['matched_tokens']} of {length * args.users}, {reports[0].copied}"
            print_row(f"{source:<16}", clocks, loaded)


@contextlib.contextmanager
def moto_server() -> Iterator[bool]:
    """Serve S3 with the bucket, for engines that start meanwhile; False if moto is not installed."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError:
        print("  S3 (moto)        not measured: moto is not installed")
        yield False
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", f"/{BUCKET.removeprefix('s3://')}")
    connection.getresponse().read()
    connection.close()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
    }  # fmt: skip
    try:
        yield True
    finally:
        server.stop()


def bench(case: str, model: Path, args: argparse.Namespace) -> None:
    """Run one case and print its table."""
    if case == "short":
        args = argparse.Namespace(**{**vars(args), "prompt": SHORT[0], "answer": SHORT[1]})
    per_turn = args.prompt + args.answer
    num_blocks = args.users * -(-per_turn * args.turns // BLOCK)
    options = device_options(args, num_blocks // (8 if case == "overload4" else 4))
    draw = random.Random(7)
    with tempfile.TemporaryDirectory(dir=args.disk) as directory:
        tiers = {} if case == "itself" else tier_options(case, num_blocks, directory)
        engines = Engine(model, options), Engine(model, options | tiers)
        histories: list[list[int]] = [[] for _ in range(args.users)]
        for turn in range(args.turns):
            for user in range(args.users):
                if case == "unique":
                    histories[user] = []
                length = (
                    args.prompt + (len(histories[user]) == 0 and case == "unique") * turn * per_turn
                )
                histories[user] += [draw.randrange(VOCABULARY) for _ in range(length)]
            said = [
                engine.answer(histories, args.answer)
                for engine in (engines[::-1] if turn % 2 else engines)
            ]
            num_equal = sum(before == after for before, after in zip(*said, strict=True))
            assert num_equal == args.users or args.device == "cuda", "the answers differ"
            for history, answer in zip(histories, said[0], strict=True):
                history += answer
            times = [f"{e.ttfts[-1]:.3f} ({e.cpu_ttfts[-1]:.3f})" for e in engines]
            equal = f"{num_equal} of {args.users} answers are equal"
            print(f"  {case}, round {turn}: {', '.join(times)}; {equal}", flush=True)
        reports = [engine.stop() for engine in engines]
    print_table(case, *engines)
    if reports[1] is not None:
        print(
            f"  tiers: {reports[1].copied}, {reports[1].counts}, offloading {reports[1].offloading}"
        )


def print_table(case: str, without: Engine, with_tiers: Engine) -> None:
    """Print the rounds and what they come to."""
    load = os.getloadavg()[0]
    print(
        f"\n{case}, load average {load:.1f}\n  round        s, without, with       CPU s, without, with"
    )
    clocks = [(without.ttfts, with_tiers.ttfts), (without.cpu_ttfts, with_tiers.cpu_ttfts)]
    for i in range(len(without.ttfts)):
        print_row(str(i), [(before[i], after[i]) for before, after in clocks])
    print_row("mean", [(statistics.fmean(x), statistics.fmean(y)) for x, y in clocks])
    for name, engine in (("without", without), ("with", with_tiers)):
        gaps = sorted(engine.gaps)
        print(
            f"  {name}: {engine.num_tokens / engine.seconds:.1f} tokens/s, inter-token latency"
            f" {1000 * statistics.fmean(gaps):.1f} ms, p99 {1000 * gaps[int(0.99 * len(gaps))]:.1f} ms"
        )


def print_row(name: str, pairs: Sequence[tuple[float, float]], more: str = "") -> None:
    """Print times without and with tiers, and the change, on each clock."""
    cells = [
        f"{before:8.3f} {after:8.3f} {100 * (after / before - 1):+7.1f} %"
        for before, after in pairs
        if before > 0
    ]
    print(f"  {name:>5} {'   '.join(cells)}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=256, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--disk", help="directory for the disk tier (default: the system's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        random_models.make(Path(directory), SHAPES[args.device], args.device)
        print(f"load average {os.getloadavg()[0]:.1f}, {args.engine}")
        for case in args.cases.split(","):
            if case == "visits":
                bench_visits(Path(directory), args)
            else:
                bench(case, Path(directory), args)


if __name__ == "__main__":
    main()
