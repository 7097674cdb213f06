"""Requests go where their prefix is: frontends in kv mode, simulated workers, all of them real processes."""

import concurrent.futures
import random
import statistics
import threading

import httpx
from deployment import MODEL

from waiting import PATIENT_S, eventually

NUM_PREFIXES, REPEATS = 8, 6
# each cache holds half of the prefixes
WORKER = ("--speedup-ratio", "50", "--block-size", "16", "--num-gpu-blocks-override", "160")
KV = ("--router-mode", "kv")


def prefix(number):
    words = random.Random(number).choices(
        ("one", "story", "about", "small", "river", "bird"), k=300
    )
    return f"{number} " + " ".join(words)


def ask(frontend, text):
    """The usage of an answer."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 4}
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def load(frontends):
    """Each prefix some times in random order, four at once; gives the share of prompt tokens that were cached."""
    texts = [f"{prefix(n)} {turn}" for turn in range(REPEATS) for n in range(NUM_PREFIXES)]
    random.Random(1).shuffle(texts)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(ask, frontends[number % len(frontends)], text)
            for number, text in enumerate(texts)
        ]
        told = [one.result() for one in asked]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    return cached / sum(usage["prompt_tokens"] for usage in told)


def is_listing(frontend, num_workers):
    answer = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()
    return len(answer["instances"]) == num_workers


def start(deployment, num_frontends, *flags):
    workers = [deployment.mocker(*WORKER) for _ in range(3)]
    frontends = [deployment.frontend(*KV, *flags) for _ in range(num_frontends)]
    for frontend in frontends:
        frontend.await_models([MODEL])
        eventually(lambda f=frontend: is_listing(f, 3), what="three workers")
    return workers, frontends


def mean_shares(*groups, rounds=6):
    """From empty caches each time: the order of requests moves a single share by 0.02, a busy machine by more.

    The groups of frontends take turns, because the machine is not as busy all the time.
    """
    rows = []
    for _ in range(rounds):
        row = []
        for frontends in groups:
            httpx.post(f"{frontends[0].url}/clear_kv_blocks", timeout=PATIENT_S)
            row.append(load(frontends))
        rows.append(row)
    return [statistics.fmean(shares) for shares in zip(*rows, strict=True)]


def test_repeated_prompt_hits_the_cache(deployment):
    _, frontends = start(deployment, 1)

    assert mean_shares(frontends) > [0.7]  # in turn it would be about 0.5


def test_two_synced_frontends_hit_as_often_as_one(deployment):
    _, alone = start(deployment, 1)
    pair = [deployment.frontend(*KV, "--router-replica-sync") for _ in range(2)]
    for frontend in pair:
        frontend.await_models([MODEL])
        eventually(lambda f=frontend: is_listing(f, 3), what="three workers")

    found_alone, found_by_both = mean_shares(alone, pair)

    assert found_by_both > found_alone - 0.03


def test_killed_worker_gets_no_request_after_it_is_noticed(deployment):
    workers, (frontend,) = start(deployment, 1)
    load([frontend])
    workers[0].kill()
    eventually(lambda: is_listing(frontend, 2), what="two workers")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda n: ask(frontend, prefix(n)), range(NUM_PREFIXES)))

    assert all(usage["completion_tokens"] == 4 for usage in told)


def test_worker_killed_under_load_breaks_only_its_own_streams(deployment):
    workers, (frontend,) = start(deployment, 1)
    texts = [f"{prefix(n % NUM_PREFIXES)} {n}" for n in range(240)]
    noticed_after = threading.Event()

    def ask_and_note(text):
        """Whether it was asked once the worker was known to be gone, and the answer's status."""
        was_noticed = noticed_after.is_set()
        body = {"model": MODEL, "prompt": text, "max_tokens": 16}
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
        return was_noticed, answer.status_code, answer.text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask_and_note, text) for text in texts[:120]]
        eventually(lambda: sum(one.done() for one in asked) >= 30, what="traffic")
        workers[0].kill()
        eventually(lambda: is_listing(frontend, 2), what="two workers")
        noticed_after.set()
        asked += [pool.submit(ask_and_note, text) for text in texts[120:]]
        told = [one.result() for one in asked]
    failed = [one for one in told if one[1] != 200]

    assert sum(was_noticed for was_noticed, _, _ in told) >= 100
    assert not [one for one in failed if one[0]]
    assert len(failed) <= 8, failed  # at most those that were under way, one for each client


def test_workers_of_one_process_are_routed_by_their_own_caches(deployment):
    fleet = deployment.mocker(*WORKER, "--num-workers", "3")
    frontend = deployment.frontend(*KV)
    frontend.await_models([MODEL])
    eventually(lambda: is_listing(frontend, 3), what="three workers")

    assert load([frontend]) > 0.7
    assert fleet.metric("requests_total") == NUM_PREFIXES * REPEATS

    fleet.kill()
    eventually(lambda: frontend.models() == [], what="no model")


def test_ranks_of_one_worker_are_routed_by_their_own_caches(deployment):
    deployment.mocker(*WORKER, "--data-parallel-size", "3")
    frontend = deployment.frontend(*KV)
    frontend.await_models([MODEL])

    assert mean_shares([frontend]) > [0.7]


def test_standalone_router_starts_and_stops(deployment):
    router = deployment.run("dynamo.router")
    eventually(lambda: "routing to" in router.log.read_text(), what="a router")

    router.end()

    assert router.exit_code() == 0
