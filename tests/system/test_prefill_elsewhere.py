"""Prefill workers and decode workers as processes of their own: same answers, and nothing lost when one goes."""

import concurrent.futures
import contextlib
import random
import re
import signal

import httpx
import pytest
from deployment import MODEL, eventually

from transfer_peer import NIXL

ALWAYS = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")
CONNECTED = re.compile(r"prefill worker \w+ is connected")
HOLD_S = 3.0
SHORT_HOLD = ("--kv-hold-s", str(HOLD_S))
ALONE = "alone"  # the same model, served by a worker that computes all by itself


def prompt(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(5, 4000), k=length)


class Split:
    """A frontend, and workers of both kinds."""

    def __init__(self, deployment):
        self.deployment = deployment
        self.frontend = deployment.frontend()

    def prefill(self, *flags):
        return self._worker("--is-prefill-worker", *flags)

    def decode(self, *flags):
        return self._worker("--disaggregation-mode", "decode", *ALWAYS, *flags)

    def alone(self):
        at = ("--endpoint", "dyn://dynamo.alone.generate", "--model-name", ALONE)
        return self._worker("--disaggregation-mode", "agg", *at)

    def _worker(self, *flags):
        worker = self.deployment.native(*flags)
        self.frontend.others.append(worker)
        return worker

    def ready(self, decode, num_prefill=1, models=(MODEL,)):
        self.frontend.await_models(list(models))
        eventually(
            lambda: len(CONNECTED.findall(decode.log.read_text())) >= num_prefill,
            within_s=30,
            what=f"{num_prefill} prefill workers are connected",
        )

    def ask(self, token_ids, model=MODEL, max_tokens=8):
        """The answer's text; fails if there is none."""
        body = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "nvext": {"ignore_eos": True},
        }
        answer = httpx.post(f"{self.frontend.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        return answer.json()["choices"][0]["text"]

    def ask_all(self, prompts, **fields):
        with concurrent.futures.ThreadPoolExecutor(32) as threads:
            return list(threads.map(lambda one: self.ask(one, **fields), prompts))


def prefills(decode, where):
    """How many prompts it had computed so."""
    row = f'dynamo_component_prefills_total{{where="{where}"}} '
    text = httpx.get(f"{decode.url}/metrics", timeout=5).text
    return next(float(line[len(row) :]) for line in text.splitlines() if line.startswith(row))


def until_idle(*workers, within_s=10.0):
    for worker in workers:
        eventually(
            lambda worker=worker: worker.metric("kvstats_active_blocks") == 0,
            within_s=within_s,
            what="no block is in use",
        )


@pytest.fixture
def split(deployment):
    return Split(deployment)


@pytest.mark.parametrize("backend", ["shm", "tcp", NIXL])
def test_32_answers_at_once_are_those_of_a_worker_that_computes_all_itself(split, backend):
    way = ("--kv-transfer-backends", backend)
    decode, prefill, _ = split.decode(*way), split.prefill(*way), split.alone()
    split.ready(decode, models=[ALONE, MODEL])
    prompts = [prompt(n) for n in (1, 2, 16, 17, 33, 200, 511, 1000, 1500, 2000)]
    prompts += [prompt(160) + prompt(i * 37 % 300 + 1, i) for i in range(22)]

    expected = split.ask_all(prompts, model=ALONE)

    assert split.ask_all(prompts) == expected
    assert split.ask_all(prompts) == expected  # now they are known on both sides
    assert prefills(decode, "fallback") == 0
    assert prefills(decode, "remote") > 32
    until_idle(decode, prefill)


def test_without_a_prefill_worker_all_is_computed_here(split):
    decode = split.decode()
    split.frontend.await_models([MODEL])

    split.ask(prompt(100))

    assert prefills(decode, "local") == 1


def test_a_prefill_worker_is_no_model(split):
    prefill = split.prefill()
    eventually(
        lambda: "serving storyteller" in prefill.log.read_text(), within_s=30, what="it serves"
    )
    decode = split.decode()
    split.ready(decode)  # the frontend has seen the prefill worker's card by now
    decode.end()

    split.frontend.await_models([], within_s=10)


def test_a_worker_without_flags_uses_prefill_workers_as_well(split):
    decode, _ = split.deployment.native(*ALWAYS), split.prefill()
    split.ready(decode)

    split.ask(prompt(300))

    assert prefills(decode, "remote") == 1


def test_prefill_workers_die_and_come_back_and_no_request_is_lost(split):
    decode, doomed = split.decode("--prefill-timeout-s", "5"), split.prefill()
    split.ready(decode)
    prompts = [prompt(300, i) for i in range(80)]
    expected = split.ask_all(prompts[:8])
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = threads.map(split.ask, prompts)
        before = prefills(decode, "remote")
        eventually(
            lambda: prefills(decode, "remote") >= before + 5, within_s=20, what="it is at work"
        )
        doomed.kill()
        answers = list(answers)
    newborn = split.prefill()
    split.ready(decode, num_prefill=2)
    before = prefills(decode, "remote")
    split.ask(prompt(400))

    assert answers[:8] == expected
    assert len(answers) == 80
    assert prefills(decode, "fallback") > 0
    assert prefills(decode, "remote") == before + 1
    until_idle(decode, newborn)


def test_a_prompt_whose_worker_dies_is_given_to_another(split):
    decode, doomed, _ = split.decode(), split.prefill(), split.prefill()
    split.ready(decode, num_prefill=2)
    doomed.signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = threads.map(split.ask, [prompt(200, i) for i in range(8)])
        eventually(
            lambda: prefills(decode, "remote") >= 4, within_s=10, what="the other one has answered"
        )
        doomed.kill()

        assert len(list(answers)) == 8
    assert decode.metric("prefill_retries_total") > 0
    assert prefills(decode, "fallback") == 0
    until_idle(decode)


@pytest.mark.parametrize("backend", ["shm", "tcp", NIXL])
def test_a_prefill_worker_that_stands_still_delays_and_loses_nothing(split, backend):
    way = ("--kv-transfer-backends", backend, "--kv-transfer-timeout-s", "1")
    decode, stuck = split.decode(*way), split.prefill(*way, "--kv-hold-s", "8")
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = threads.map(split.ask, [prompt(500, i) for i in range(24)])
        eventually(lambda: prefills(decode, "remote") >= 1, within_s=20, what="a prompt was copied")
        stuck.signal(signal.SIGSTOP)

        assert len(list(answers)) == 24
    assert prefills(decode, "fallback") > 0
    until_idle(decode)
    stuck.signal(signal.SIGCONT)
    until_idle(stuck, within_s=25)


def test_blocks_held_for_a_decode_worker_that_dies_are_freed(split):
    decode, prefill = split.decode(), split.prefill(*SHORT_HOLD)
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(split.ask, prompt(700, i)) for i in range(16)]
        eventually(
            lambda: prefill.metric("kvstats_active_blocks") > 0, within_s=10, what="it computes"
        )
        decode.kill()
        concurrent.futures.wait(asked)  # they fail: nobody else could answer

    until_idle(prefill, within_s=HOLD_S + 10)


def test_clients_that_go_away_at_any_point_leave_no_block_behind(split):
    decode, prefill = split.decode(), split.prefill(*SHORT_HOLD)
    split.ready(decode)
    body = {"model": MODEL, "max_tokens": 50, "stream": True, "nvext": {"ignore_eos": True}}

    def leave(i):
        one = body | {"prompt": prompt(700, i)}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{split.frontend.url}/v1/completions", json=one, timeout=0.01 * (i + 1))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(leave, range(40)))

    until_idle(decode, prefill, within_s=HOLD_S + 10)
    assert split.ask(prompt(100))
