"""A frontend in mode kv, prefill workers and decode workers: prefill by prefix, decode by load, nothing lost."""

import collections
import concurrent.futures
import itertools
import random
import re

import httpx
import pytest
from deployment import MODEL, UNHURRIED
from split import prefills

from waiting import PATIENT_S, eventually

CONNECTED = re.compile(r"prefill worker \w+ is connected")
ALONE = "alone"  # the same model, served by a worker that computes all by itself
ALL_AWAY = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")


def prompt(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(5, 4000), k=length)


class Pools:
    """A frontend, two prefill workers and two decode workers."""

    def __init__(self, deployment):
        self.deployment = deployment
        self.frontend = deployment.frontend("--router-mode", "kv", *ALL_AWAY)
        self.prefill = [self.worker("--is-prefill-worker") for _ in range(2)]
        self.decode = [self.worker("--disaggregation-mode", "decode") for _ in range(2)]

    def worker(self, *flags):
        worker = self.deployment.native(*flags)
        self.frontend.others.append(worker)
        return worker

    def alone(self):
        at = ("--endpoint", "dyn://dynamo.alone.generate", "--model-name", ALONE)
        return self.worker("--disaggregation-mode", "agg", *at)

    def ready(self, models=(MODEL,), num_prefill=2):
        self.frontend.await_models(list(models))
        for decode in self.decode:
            eventually(
                lambda decode=decode: len(CONNECTED.findall(decode.log.read_text())) >= num_prefill,
                what="a decode worker is connected to the prefill workers",
            )
        eventually(
            lambda: "by prefill workers of" in self.frontend.log.read_text(),
            what="the frontend knows the prefill workers",
        )

    def ask(self, token_ids, model=MODEL, max_tokens=8, **fields):
        """The answer; fails if there is none."""
        body = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "nvext": {"ignore_eos": True, "extra_fields": ["worker_id", "timing"]},
            **fields,
        }
        answer = httpx.post(f"{self.frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask_all(self, prompts, **fields):
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            return list(threads.map(lambda one: self.ask(one, **fields), prompts))

    def num_stored_events(self):
        """How many events of stored blocks the routers have applied; they may come later than the answer."""
        series = 'dynamo_component_kv_cache_events_applied{event_type="stored",status="ok"}'
        return self.frontend.metric(series)

    def routed(self, **labels):
        """How many prompts the frontend had computed so."""
        text = httpx.get(f"{self.frontend.url}/metrics", timeout=PATIENT_S).text
        rows = [
            row for row in text.splitlines() if row.startswith("dynamo_frontend_routed_prefill")
        ]
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(float(row.rpartition(" ")[2]) for row in rows if all(w in row for w in wanted))


@pytest.fixture
def pools(deployment):
    deployment.environ |= UNHURRIED
    return Pools(deployment)


def texts(answers):
    return [[choice["text"] for choice in answer["choices"]] for answer in answers]


def test_prefill_by_prefix_gives_the_answers_of_an_aggregated_worker(pools):
    pools.alone()
    pools.ready(models=[ALONE, MODEL])
    prompts = [prompt(n) for n in (1, 2, 16, 17, 33, 200, 511, 1000, 1500)]
    prompts += [prompt(160) + prompt(i * 37 % 300 + 1, i) for i in range(8)]

    expected = texts(pools.ask_all(prompts, model=ALONE))
    answers = pools.ask_all(prompts)

    assert texts(answers) == expected
    assert texts(pools.ask_all(prompts)) == expected  # now they are known on both sides
    assert texts(pools.ask_all(prompts[5:7], n=3)) == texts(
        pools.ask_all(prompts[5:7], n=3, model=ALONE)
    )
    num_asked = 2 * len(prompts) + 2
    assert pools.routed(where="fallback") == 0
    assert pools.routed(where="remote") >= 15  # of the first time, those of a block at least
    assert pools.routed(where="local") + pools.routed(where="remote") == num_asked
    assert sum(worker.metric("prefills_total") for worker in pools.decode) == num_asked
    assert sum(worker.metric("kvstats_active_blocks") for worker in pools.prefill) == 0


def test_prefixes_return_to_their_prefill_worker(pools):
    pools.ready()
    prefixes = [prompt(320, f"prefix {i}") for i in range(4)]
    first = {}
    for i, one in enumerate(prefixes):
        num_known = pools.num_stored_events()
        first[i] = pools.ask(one)["nvext"]["worker_id"]
        eventually(
            lambda num_known=num_known: pools.num_stored_events() >= num_known + 2,
            what="the events of both workers at their routers",
        )
    before = sum(worker.metric("requests_total") for worker in pools.prefill)
    again = [(i, prefixes[i] + prompt(20, f"{turn} {i}")) for turn in range(4) for i in range(4)]
    answers = [(i, pools.ask(one)) for i, one in again]
    hit_rates = [worker.metric("kvstats_gpu_prefix_cache_hit_rate") for worker in pools.prefill]
    told = [(i, answer["nvext"]["worker_id"]) for i, answer in answers]
    at_once = pools.ask_all([prompt(100, i) for i in range(16)], max_tokens=50)

    assert all(ids["prefill_worker_id"] == first[i]["prefill_worker_id"] for i, ids in told)
    assert all(ids["prefill_worker_id"] != ids["decode_worker_id"] for _, ids in told)
    assert sum(worker.metric("requests_total") for worker in pools.prefill) >= before + 16
    assert max(hit_rates) > 0.5  # 320 of 340 tokens, four times of five
    spread = collections.Counter(one["nvext"]["worker_id"]["decode_worker_id"] for one in at_once)
    assert len(spread) == 2
    assert min(spread.values()) >= 4
    timing = answers[-1][1]["nvext"]["timing"]
    assert timing["prefill_time_ms"] > 0
    assert timing["kv_transfer_time_ms"] > 0
    assert timing["kv_transfer_blocks"] > 0


def test_killed_prefill_worker_loses_no_request(pools):
    pools.ready()
    prompts = [prompt(300, i) for i in range(60)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        answers = threads.map(pools.ask, prompts)
        eventually(lambda: pools.routed(where="remote") >= 10, what="traffic")
        pools.prefill[0].kill()
        answers = list(answers)
    eventually(lambda: pools.routed(where="remote") >= 50, what="the other one computed them")
    pools.prefill[1].kill()
    last = pools.ask(prompt(310))

    assert len(answers) == 60
    assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers)
    assert last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("engine", ["native", "mocker"])
def test_prefill_worker_is_enough_to_disaggregate(deployment, engine):
    """The command lines of the fourth article: a flag on the prefill worker, none on the other, no connector named."""
    frontend = deployment.frontend("--router-mode", "kv")
    start = getattr(deployment, engine)
    decode = start("--connector", "null", "--max-local-prefill-length", "0")
    frontend.others.append(decode)
    frontend.await_models([MODEL])
    before = _count(frontend)
    prefill = start("--connector", "null", "--is-prefill-worker")
    frontend.others.append(prefill)
    eventually(
        lambda: (
            "by prefill workers of" in frontend.log.read_text()
            and CONNECTED.search(decode.log.read_text())
        ),
        what="the prefill worker is known",
    )
    answer = httpx.post(
        f"{frontend.url}/v1/completions",
        json={"model": MODEL, "prompt": prompt(100), "max_tokens": 4, "temperature": 0},
        timeout=PATIENT_S,
    )

    assert answer.status_code == 200, answer.text
    assert (before, _count(frontend)) == (0, 1)


def test_prefill_worker_from_which_no_blocks_can_be_copied_gets_no_prompts(deployment):
    frontend = deployment.frontend("--router-mode", "kv", *ALL_AWAY)
    decode = deployment.mocker("--disaggregation-mode", "decode", "--kv-transfer-backends", "shm")
    apart = deployment.mocker("--is-prefill-worker", "--kv-transfer-backends", "tcp")
    frontend.others += [decode, apart]
    frontend.await_models([MODEL])
    eventually(
        lambda: "decode workers that cannot copy: " in frontend.log.read_text(),
        what="the frontend knows from the card of the decode worker",
    )
    ask(frontend, 0)
    before = _count(frontend)
    other = deployment.mocker("--is-prefill-worker")
    frontend.others.append(other)
    eventually(lambda: "is connected" in decode.log.read_text(), what="its blocks can be copied")
    seeds = itertools.count(1)  # so that no prompt is in a cache
    eventually(
        lambda: ask(frontend, next(seeds)) or _count(frontend),
        what="the other prefill worker is used",
    )

    assert before == 0
    assert apart.metric("requests_total") == 0
    assert prefills(decode, "fallback") == 0


def ask(frontend, seed):
    body = {"model": MODEL, "prompt": prompt(100, seed), "max_tokens": 4}
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text


def _count(frontend):
    """How many prompts the frontend had computed by prefill workers."""
    text = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
    rows = [row for row in text.splitlines() if "routed_prefills_total{" in row]
    return sum(float(row.rpartition(" ")[2]) for row in rows if 'where="remote"' in row)
