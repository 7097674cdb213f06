"""Workers are killed, stopped and replaced while they answer; clients get their answers."""

import json
import signal

import pytest
from deployment import MODEL, newly_asked

from waiting import eventually

QUESTION = "Tell me a story about a cat"
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
PACED = ("--tick-ms", "10")
REAL_LEN = 1200  # tokens; three seconds, in which its worker must be found and killed


def text_of(lines):
    """Return the text of a complete stream, and its usage."""
    found = list(lines)
    assert found[-1] == "[DONE]", found[-1]
    chunks = [json.loads(line) for line in found[:-1]]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert not errors
    pieces = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    return "".join(pieces), chunks[-1]["usage"]


def asked(**fields):
    return {"stream_options": {"include_usage": True}, **LONG, **fields}


def is_busy(worker):
    return worker.is_running and worker.metric("inflight_requests") > 0


def start(deployment, num_workers, kind="mocker", flags=PACED):
    workers = [getattr(deployment, kind)(*flags) for _ in range(num_workers)]
    frontend = deployment.frontend()
    frontend.others = list(workers)
    await_workers(frontend, num_workers)
    return frontend, workers


def await_workers(frontend, number):
    frontend.await_models([MODEL])
    name = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
    eventually(lambda: frontend.metric(name) == number, what=f"{number} workers")


@pytest.mark.parametrize(
    "way",
    [{}, {"temperature": 1.0, "seed": 11}, {"frequency_penalty": 1.0}],
    ids=["greedy", "sampled with a seed", "penalties"],
)
def test_answer_of_a_killed_worker_equals_the_undisturbed_one(deployment, way):
    frontend, workers = start(deployment, 2, "native", ())
    fields = asked(**way, max_tokens=REAL_LEN)
    with frontend.stream(QUESTION, **fields) as lines:
        undisturbed = text_of(lines)
    with newly_asked(workers) as holder, frontend.stream(QUESTION, **fields) as lines:
        begun = [next(lines) for _ in range(3)]
        holder().kill()
        text, usage = text_of([*begun, *lines])

    assert text == undisturbed[0]
    assert usage["prompt_tokens"] == undisturbed[1]["prompt_tokens"]
    assert usage["completion_tokens"] == REAL_LEN
    assert "Stream disconnected... recreating stream..." in frontend.log.read_text()


def test_stopped_worker_is_abandoned_and_harmless_when_it_wakes(deployment):
    frontend, workers = start(deployment, 2)
    fields = asked(max_tokens=400)
    with frontend.stream(QUESTION, **fields) as lines:
        undisturbed = text_of(lines)
    with newly_asked(workers) as holder, frontend.stream(QUESTION, **fields) as lines:
        begun = [next(lines) for _ in range(20)]
        stopped = holder()
        stopped.signal(signal.SIGSTOP)
        begun += list(lines)  # while it stands still: the other one continues
        stopped.signal(signal.SIGCONT)
        answer = text_of(begun)
    eventually(lambda: not is_busy(stopped), what="its requests to be cancelled")

    assert answer == undisturbed
    assert frontend.chat(max_tokens=4).status_code == 200


def test_stopped_only_worker_is_waited_for(deployment):
    frontend, (worker,) = start(deployment, 1, flags=("--tick-ms", "20"))
    fields = asked(max_tokens=400)
    with frontend.stream(QUESTION, **fields) as lines:
        undisturbed = text_of(lines)
    with frontend.stream(QUESTION, **fields) as lines:
        begun = [next(lines) for _ in range(20)]
        worker.signal(signal.SIGSTOP)
        eventually(
            lambda: "no other can take over" in frontend.log.read_text(),
            what="the limit of silence",
        )
        worker.signal(signal.SIGCONT)
        answer = text_of([*begun, *lines])

    assert answer == undisturbed
    assert "recreating stream" not in frontend.log.read_text()


def test_answer_unfinished_after_the_grace_period_migrates(deployment):
    slow = ("--tick-ms", "300", "--graceful-shutdown-timeout", "0.2")
    frontend, (leaving,) = start(deployment, 1, flags=slow)
    with frontend.stream(QUESTION, **asked(max_tokens=300)) as lines:
        begun = [next(lines) for _ in range(3)]
        frontend.others.append(deployment.mocker("--speedup-ratio", "1000"))
        await_workers(frontend, 2)
        leaving.signal(signal.SIGTERM)
        _, usage = text_of([*begun, *lines])

    assert usage["completion_tokens"] == 300
    assert leaving.exit_code() == 0
    assert "the worker stops: ask another" in frontend.log.read_text()
