"""The planner scales real worker processes under streams: 1 -> 2 -> 1, and no answer is cut."""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import re
import signal
import threading

import httpx
import planners
import pytest
from deployment import MODEL, chat
from planners import Planner
from split import ALWAYS, Split, prompt

import ports
import processes
from dynamo.planner import profile_files
from planner_cases import make_steady_profile
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system
WORKER = "--tick-ms 10 --num-gpu-blocks-override 80 --block-size 64 --max-num-seqs 16"
# the time of a step grows with the use of its cache: 120 ms for ten answers of NUM_TIMED_TOKENS, 80 for five. Steps are
# as long as this because one that begins late on a busy machine is caught up if it is not later than a step
TIMED_WORKER = "--speedup-ratio 0.2 --num-gpu-blocks-override 145 --block-size 8 --max-num-seqs 16"
NUM_TIMED_TOKENS = 60
KV_USAGE_OF_TWO = 0.3  # above which a second worker comes
SCALING = (
    "--adjustment-interval", "0.25", "--scale-down-delay", "0.5", "--max-workers", "2",
    "--decode-kv-scale-up-threshold", str(KV_USAGE_OF_TWO), "--decode-kv-scale-down-threshold", "0.15",
)  # fmt: skip
NUM_TOKENS = 400  # of an answer: four seconds


def start_planner(deployment, frontend, *flags, worker=WORKER):
    return Planner(deployment, frontend, "--worker-flags", worker, *SCALING, *flags)


def stream_to_the_end(frontend, num_tokens=NUM_TOKENS):
    return planners.stream_to_the_end(frontend, MODEL, num_tokens)


@contextlib.contextmanager
def streaming(frontend, num_streams=10, num_tokens=NUM_TOKENS):
    """Keep so many answers streaming; what is yielded has how each ended, once the block is left."""
    enough = threading.Event()
    answers = []

    def stream_until_enough():
        while not enough.is_set():
            answers.append(stream_to_the_end(frontend, num_tokens))

    with concurrent.futures.ThreadPoolExecutor(num_streams) as pool:
        streams = [pool.submit(stream_until_enough) for _ in range(num_streams)]
        try:
            yield answers
        finally:
            enough.set()
        for each in streams:
            each.result()


@pytest.fixture
def frontend(deployment):
    return deployment.frontend()


@pytest.mark.parametrize(
    ("worker", "num_tokens", "flags"),
    [
        (WORKER, NUM_TOKENS, ()),
        (TIMED_WORKER, NUM_TIMED_TOKENS, ("--policy", "regression", "--itl", "100")),
    ],
    ids=["load", "regression"],
)
def test_workers_come_and_go_under_streams_and_no_answer_is_cut(
    deployment, frontend, worker, num_tokens, flags
):
    planner = start_planner(deployment, frontend, *flags, worker=worker)
    frontend.await_models([MODEL])
    with streaming(frontend, num_tokens=num_tokens) as answers:
        eventually(
            lambda: planner.metric("num_decode_replicas") == 2, what="a second worker serves"
        )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        while planner.num_workers() == 2:  # few streams at a time: one worker suffices
            answers += pool.map(stream_to_the_end, [frontend] * 2, [num_tokens] * 2)
            assert len(answers) < 400, planner.decisions()[:3]

    assert set(answers) == {(num_tokens, "[DONE]")}
    assert planner.metric("scaling_events_total") >= 2
    eventually(lambda: planner.metric("num_decode_replicas") == 1, what="one is left")


def test_worker_changes_its_role_where_the_budget_is_full_and_no_answer_is_cut(
    deployment, frontend
):
    # a prompt takes 0.3 s: so prompts queue also where the machine lets clients ask for few at a time
    flags = f"{WORKER} --max-num-batched-tokens 32 {' '.join(ALWAYS)}"
    sizes = ("--mode", "disagg", "--max-gpu-budget", "3")
    # so long both decode workers stay, unless one changes its role
    stays = ("--scale-down-delay", "60")
    planner = start_planner(deployment, frontend, *sizes, *stays, worker=flags)
    frontend.await_models([MODEL])
    enough = threading.Event()

    def prefill_until_enough(number):
        split = Split(deployment, frontend=frontend)
        for seed in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
            split.ask(prompt(900, 100 * seed + number), max_tokens=1)

    with streaming(frontend) as answers:
        eventually(
            lambda: planner.metric("num_decode_replicas") == 2, what="there are two decode workers"
        )
    with (
        streaming(frontend, 2) as few_answers,  # which one worker can carry
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        prompts = []
        try:
            prompts += [pool.submit(prefill_until_enough, number) for number in range(12)]
            eventually(
                lambda: "became a prefill worker" in planner.process.log.read_text(),
                what="one of them has become a prefill worker",
            )
            eventually(
                lambda: planner.metric("num_prefill_replicas") == 2,
                what="it counts as one",
            )
        finally:
            enough.set()
        for each in prompts:
            each.result()

    assert set(answers + few_answers) == {(NUM_TOKENS, "[DONE]")}
    assert any("1 from decode to prefill" in row["reason"] for row in planner.decisions())


def test_mode_auto_moves_to_disaggregated_and_back_and_no_answer_is_cut(
    deployment, frontend, tmp_path
):
    # with it disaggregated needs less at 2 requests/s as at 100: the machine may be slow
    profile = make_steady_profile(prompt_tokens_per_s=1000, max_kv_tokens=5000)
    profile_files.write_profile(profile, tmp_path / "profile")
    sizes = ("--mode", "auto", "--max-gpu-budget", "3", "--adjustment-interval", "0.5")
    # a worker that has not come after three start-up times is withdrawn, however slow the machine
    targets = ("--policy", "predictive", "--ttft", "2000", "--itl", "12.5", "--startup-time", "20")
    targets += ("--no-correction",)  # a worker there misses the ITL, and is scaled for throughput
    series = ("--load-predictor", "constant", "--profile-results-dir", str(tmp_path / "profile"))
    flags = f"{WORKER} {' '.join(ALWAYS)}"
    planner = start_planner(deployment, frontend, *sizes, *targets, *series, worker=flags)
    frontend.await_models([MODEL])
    enough = threading.Event()
    split = Split(deployment, frontend=frontend)

    def ask_until_enough(number):
        for seed in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
            split.ask(prompt(200, 100 * seed + number), max_tokens=20)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_until_enough, number) for number in range(8)]
        try:
            eventually(
                lambda: planner.metric("num_prefill_replicas") > 0,
                what="a prefill worker serves",
            )
        finally:
            enough.set()
        for each in asking:
            each.result()
    eventually(lambda: planner.metric("num_prefill_replicas") == 0, what="it is aggregated again")
    split.ask(prompt(200), max_tokens=20)

    reasons = " ".join(row["reason"] for row in planner.decisions())
    assert "disaggregated needs less than aggregated" in reasons


def test_requests_for_an_adapter_are_traffic_of_its_model(deployment, frontend):
    planner = start_planner(deployment, frontend, worker=f"{WORKER} --lora-names poet")
    frontend.await_models(["poet", MODEL])

    def is_counted():
        assert frontend.chat(model="poet", max_tokens=1).status_code == 200
        return any(row.get("requests_per_s", 0) > 0 for row in planner.decisions())

    eventually(is_counted, what="a request is counted")


def test_killed_planner_cuts_no_answer_and_leaves_no_worker(deployment, frontend):
    planner = start_planner(deployment, frontend)
    frontend.await_models([MODEL])
    below = processes.descendants(planner.process.pid)
    with frontend.stream(max_tokens=NUM_TOKENS, ignore_eos=True) as lines:
        next(lines)
        planner.process.kill()
        rest = list(lines)

    assert rest[-1] == "[DONE]"
    assert not any("error" in line for line in rest)
    eventually(
        lambda: not [pid for pid in below if pathlib.Path(f"/proc/{pid}").exists()],
        what="the workers have ended",
    )
    frontend.await_models([])


def test_worker_that_never_comes_is_withdrawn_and_no_answer_is_cut(deployment, frontend):
    planner = start_planner(deployment, frontend)
    frontend.await_models([MODEL])
    eventually(lambda: planner.metric("num_decode_replicas") == 1, what="the first worker serves")
    before = planner.worker_pids()
    with streaming(frontend) as answers:
        eventually(lambda: planner.worker_pids() - before, what="a second worker is started")
        (second,) = planner.worker_pids() - before
        os.kill(second, signal.SIGSTOP)
        try:
            eventually(lambda: planner.decisions_with("not ready after"), what="it is withdrawn")
        finally:
            os.kill(second, signal.SIGCONT)
        eventually(
            lambda: planner.metric("num_decode_replicas") == 2, what="another one is tried later"
        )

    row = planner.decisions_with("not ready after")[-1]  # the first; later starts may be slow, too
    assert "withdrawn, again in" in row["reason"]
    assert row["replicas"]["decode"] == 1
    assert set(answers) == {(NUM_TOKENS, "[DONE]")}


def test_metrics_that_stop_under_load_hold_the_workers_until_they_are_back(deployment, frontend):
    port = ports.reserve()
    observed = deployment.frontend(port=port)
    urls = f"{frontend.url},{observed.url}"
    planner = start_planner(deployment, frontend, "--frontend-url", urls)
    frontend.await_models([MODEL])
    eventually(lambda: planner.decisions()[0]["outcome"] == "hold", what="the metrics are read")
    observed.end()
    eventually(lambda: planner.metric("metrics_missing") == 1, what="they are missing")

    def is_held():
        row = planner.decisions()[0]
        return row["kv_usage"] > KV_USAGE_OF_TWO and "skipped, metrics are" in row["reason"]

    with streaming(frontend) as answers:
        eventually(is_held, what="two workers are needed, and the metrics are stale")
        replicas = {row["replicas"]["decode"] for row in planner.decisions()}
        deployment.frontend(port=port)
        eventually(
            lambda: planner.metric("num_decode_replicas") == 2, what="it goes on when they are back"
        )

    assert replicas == {1}
    assert set(answers) == {(NUM_TOKENS, "[DONE]")}


def workers_of_models(url):
    rows = httpx.get(f"{url}/v1/models", timeout=PATIENT_S).json()["data"]
    return [row["num_workers"] for row in rows]


def test_served_model_sleeps_and_wakes_for_a_request_to_it_and_to_its_adapter(deployment):
    port = ports.reserve()
    flags = "--scale-down-delay 0.5 --adjustment-interval 0.25"
    deployment.environ["DYN_WORKER_WAIT_SECS"] = str(
        PATIENT_S
    )  # a busy machine takes longer than last time
    process = deployment.run(
        *("dynamo.cli", "serve", "--engine", "mocker", "--http-port", str(port)),
        *("--planner", "--planner-min-workers", "0", "--planner-max-workers", "2"),
        *("--planner-flags", flags, "--worker-flags", "--tick-ms 5 --lora-names tuned"),
    )
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: "answers at" in process.log.read_text(), what="it serves")
    decisions = re.search(r"decisions at (\S+)", process.log.read_text())[1]

    def present():
        process.check()
        try:
            rows = httpx.get(decisions, timeout=PATIENT_S).json()["decisions"]
        except httpx.TransportError:  # it starts
            rows = []
        return rows[0]["present"]["decode"] if rows else None

    for asked in ({}, {"model": "tuned"}):
        eventually(lambda: present() == 0, what="it sleeps")
        eventually(lambda: workers_of_models(url) == [0], what="it is listed")
        body = chat("Tell me a story", max_tokens=8) | asked
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8


def test_second_planner_stands_by(deployment, frontend):
    first = start_planner(deployment, frontend)
    frontend.await_models([MODEL])
    second = start_planner(deployment, frontend)
    eventually(lambda: second.decisions(), what="the second planner decides")

    assert not second.decisions()[0]["is_leader"]
    assert first.decisions()[0]["is_leader"]
