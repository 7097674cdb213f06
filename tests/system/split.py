"""Prefill and decode workers as processes of their own, and questions to them."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import re

import httpx
from deployment import MODEL

from waiting import PATIENT_S, eventually

ALWAYS = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")
CONNECTED = re.compile(r"prefill worker \w+ is connected")
ALONE = "alone"  # the same model, served by a worker that computes all by itself


def prompt(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(5, 4000), k=length)


class Split:
    """A frontend, and workers of both kinds."""

    def __init__(self, deployment, engine="native", frontend=None):
        self.deployment = deployment
        self._engine = engine
        self.frontend = frontend or deployment.frontend()

    def prefill(self, *flags):
        return self._worker("--is-prefill-worker", *flags)

    def decode(self, *flags):
        return self._worker("--disaggregation-mode", "decode", *ALWAYS, *flags)

    def alone(self, *flags):
        at = ("--endpoint", "dyn://dynamo.alone.generate", "--model-name", ALONE)
        return self._worker("--disaggregation-mode", "agg", *at, *flags)

    def _worker(self, *flags):
        worker = getattr(self.deployment, self._engine)(*flags)
        self.frontend.others.append(worker)
        return worker

    def ready(self, decode, num_prefill=1, models=(MODEL,)):
        """Wait until these are served, and so many prefill workers were connected since it began."""
        self.frontend.await_models(list(models))
        eventually(
            lambda: len(CONNECTED.findall(decode.log.read_text())) >= num_prefill,
            what=f"{num_prefill} prefill workers are connected",
        )

    def ask(self, token_ids, model=MODEL, max_tokens=8, **fields):
        """The answer's text; fails if there is none."""
        body = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "nvext": {"ignore_eos": True},
        } | fields
        answer = httpx.post(f"{self.frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        return answer.json()["choices"][0]["text"]

    def ask_all(self, prompts, **fields):
        with concurrent.futures.ThreadPoolExecutor(32) as threads:
            return list(threads.map(lambda one: self.ask(one, **fields), prompts))


def prefills(decode, where):
    """How many prompts it had computed so."""
    row = f'dynamo_component_prefills_total{{where="{where}"}} '
    lines = decode.metrics().splitlines()
    return next(float(line[len(row) :]) for line in lines if line.startswith(row))


def until_idle(*workers, within_s=PATIENT_S):
    for worker in workers:
        eventually(
            lambda worker=worker: worker.metric("kvstats_active_blocks") == 0,
            within_s=within_s,
            what="no block is in use",
        )


class Question:
    """A streamed request that is sent at once, and whose client may go away at any time."""

    def __init__(self, frontend, token_ids, max_tokens=8):
        body = {
            "model": MODEL,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "stream": True,
            "nvext": {"ignore_eos": True},
        }
        self._connection = http.client.HTTPConnection(frontend.url.removeprefix("http://"))
        self._connection.request("POST", "/v1/completions", json.dumps(body))

    def leave(self):
        self._connection.close()


NUM = 4  # requests at a time
HOLD_S = 4.0
QUICK = ("--speedup-ratio", "20", "--kv-hold-s", str(HOLD_S))
SLOW = ("--speedup-ratio", "0.02", "--kv-hold-s", "30")  # a prefill takes more than a second
PATIENT = ("--kv-transfer-patience-s", "5")  # though computing a prompt takes less time
SLOW_LINK = (*QUICK, *PATIENT, "--kv-transfer-bandwidth", "0.04")  # a copy takes two
BY_TCP = ("--kv-transfer-backends", "tcp")


class Stage:
    """A point on the way of a prompt, at which it stays for a while."""

    def __init__(self, prefill_flags, decode_flags, count):
        self.prefill_flags, self.decode_flags = prefill_flags, decode_flags
        self.count = count  # of those that have come so far, by prefill and decode workers

    def reached(self, prefill_workers, decode_workers, num_before=0):
        eventually(
            lambda: self.count(prefill_workers, decode_workers) >= num_before + NUM,
            what="the prompts are where they should be",
        )


def num_at_prefill_workers(prefill_workers, _):
    return sum(worker.metric("requests_total") for worker in prefill_workers)


def num_to_copy(_, decode_workers):
    return sum(worker.metric("remote_prefill_seconds_count") for worker in decode_workers)


STAGES = {
    "queued": Stage((*SLOW, "--max-num-seqs", "1"), QUICK, num_at_prefill_workers),
    "computed": Stage(SLOW, QUICK, num_at_prefill_workers),
    "copied": Stage((*QUICK, *BY_TCP), (*SLOW_LINK, *BY_TCP), num_to_copy),
}
MAPPED = Stage(QUICK, SLOW_LINK, num_to_copy)  # from memory that outlives its holder


@contextlib.contextmanager
def asking(split, prompts):
    """Answers to all of them, on their way; gives the list that has them in the end."""
    answers = []
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(split.ask, one) for one in prompts]
        yield answers
        answers += [one.result() for one in asked]


def start(split, stage, num_prefill, num_decode):
    prefill = [split.prefill(*stage.prefill_flags) for _ in range(num_prefill)]
    decode = [split.decode(*stage.decode_flags) for _ in range(num_decode)]
    for worker in decode:
        split.ready(worker, num_prefill)
    name = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
    eventually(lambda: split.frontend.metric(name) == num_decode, what="all are known")
    return prefill, decode


def prompts_of(seed):
    return [prompt(600, f"{seed} {i}") for i in range(NUM)]


def total(workers, where):
    return sum(prefills(worker, where) for worker in workers)


def num_moved(split):
    text = httpx.get(f"{split.frontend.url}/metrics", timeout=PATIENT_S).text
    rows = [row for row in text.splitlines() if row.startswith("dynamo_frontend_model_migration_")]
    return sum(float(row.rpartition(" ")[2]) for row in rows if "_total{" in row)
