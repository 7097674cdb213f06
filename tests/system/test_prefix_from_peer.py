"""Two native workers: a prefix that one has is copied to the other, for a prompt that goes there or ahead of need.

And a prefill worker copies what the decode worker has of a prompt.
"""

import contextlib
import signal

import httpx
import pytest
from deployment import MODEL
from split import ALONE, Split, prefills, prompt

from dynamo.disagg import peer_prefixes
from waiting import PATIENT_S, eventually

STORY = " ".join(f"Tell me the story of the cat number {i}." for i in range(40))
FIELDS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}


def ids_of(frontend, num_workers):
    """Return the instance ids of the workers, once the frontend knows so many."""

    def find():
        rows = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()["instances"]
        return sorted({row["instance_id"] for row in rows if row["endpoint"] == "generate"})

    eventually(lambda: len(find()) == num_workers, what=f"{num_workers} workers")
    return find()


def ask(frontend, text, instance_id=None):
    nvext = {"extra_fields": ["timing", "worker_id"]}
    if instance_id is not None:
        nvext["backend_instance_id"] = instance_id
    answer = frontend.chat(text, nvext=nvext, **FIELDS)
    assert answer.status_code == 200, answer.text
    timing = answer.json()["nvext"]["timing"]
    return answer.json()["choices"][0]["message"]["content"], timing.get("kv_tier_tokens", {})


@pytest.fixture
def start(deployment):
    """Start two workers and a frontend with these flags."""

    def start(*flags):
        workers = [deployment.native("--kv-peer-prefixes") for _ in range(2)]
        frontend = deployment.frontend("--router-mode", "kv", *flags)
        frontend.others = workers
        frontend.await_models([MODEL])
        return frontend

    return start


@pytest.fixture
def frontend(start):
    return start()


def tell_first(frontend, text, instance_id):
    """Let one worker answer, and return when the router knows which blocks it has stored. Return the answer."""

    def num_events():
        text = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
        rows = [
            row
            for row in text.splitlines()
            if row.startswith("dynamo_component_kv_cache_events_applied")
        ]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    before = num_events()
    said, _ = ask(frontend, text, instance_id)
    eventually(lambda: num_events() > before, what="KV events at the router")
    return said


def test_prefix_is_copied_from_the_other_worker_and_computed_when_that_is_dead(frontend):
    first, second = ids_of(frontend, 2)
    copied = []

    def is_copied():
        """A copy that takes longer than computing would is given up: on a busy machine another may be in time."""
        story = f"Story {len(copied)}. {STORY}"
        said = tell_first(frontend, story, first)
        again, loaded = ask(frontend, story, second)
        assert again == said
        copied.append(loaded.get("peer", 0))
        return copied[-1] > 300

    eventually(is_copied, what="a copied prefix", every_s=1)
    assert sum(worker.metric("kv_peer_tokens_total") for worker in frontend.others) > 300
    longer = f"{STORY} {STORY}"
    said = tell_first(frontend, longer, first)
    holder = max(frontend.others, key=lambda worker: worker.num_requests())
    holder.signal(signal.SIGKILL)
    again, loaded = ask(frontend, longer, second)
    assert again == said
    assert loaded == {}


def num_copies_ahead(frontend):
    return frontend.metric(f'dynamo_frontend_router_prefix_copies_total{{model="{MODEL}"}}')


def test_prefix_for_which_a_queue_grows_is_copied_ahead_of_need(start):
    frontend = start("--kv-overlap-score-weight", "1000")  # a queue never sends one away
    first, second = ids_of(frontend, 2)
    stories = []  # with the answer of the first worker

    def is_copied():
        """Return whether a prefix was copied: not if its prompts come too slowly, or the copy does.

        That happens on a busy machine, as above. Then the other worker computes the prefix, and no copy follows.
        """
        story = f"Story {len(stories)}. {STORY}"
        stories.append((story, tell_first(frontend, story, first)))
        other = min(frontend.others, key=lambda worker: worker.num_requests())
        num_ahead = num_copies_ahead(frontend)
        num_requests, num_tokens = map(other.metric, ("requests_total", "kv_peer_tokens_total"))

        def has_ended():
            has_it = other.metric("requests_total") > num_requests
            return has_it and other.metric("inflight_requests") == 0

        with contextlib.ExitStack() as streams:
            for i in range(6):
                stream = frontend.stream(f"{story} {i}", max_tokens=600, ignore_eos=True)
                next(streams.enter_context(stream))
            if num_copies_ahead(frontend) == num_ahead:
                return False
            eventually(has_ended, what="the end of the copy ahead of need")
        return other.metric("kv_peer_tokens_total") - num_tokens > 300

    eventually(is_copied, what="a prefix copied ahead of need", every_s=1)
    story, said = stories[-1]
    again, loaded = ask(frontend, story, second)

    assert again == said
    assert loaded == {}  # it has the blocks itself
    assert "copying a prefix ahead of need: 4 prompts in" in frontend.log.read_text()


def test_prefill_worker_copies_what_the_decode_worker_has_of_a_prompt(deployment):
    split = Split(deployment)
    peers = ("--kv-peer-prefixes",)
    decode, _ = split.decode(*peers), split.alone()
    split.frontend.await_models([ALONE, MODEL])
    known, new = [prompt(640, i) for i in range(5)], prompt(320, 1)
    for tokens in known:  # computed by the decode worker: there is no other yet
        assert split.ask(tokens) == split.ask(tokens, model=ALONE)
    prefill = split.prefill(*peers)
    split.ready(decode, models=[ALONE, MODEL])

    def is_copied():
        """A copy that takes longer than computing would is given up: on a busy machine another may be in time."""
        tokens = known.pop() + new
        assert split.ask(tokens) == split.ask(tokens, model=ALONE)
        return prefill.metric("kv_peer_tokens_total") > 0

    eventually(is_copied, what="a copied prefix", every_s=peer_prefixes.REST_S)
    assert prefills(decode, "remote") == 5 - len(known)
    assert prefill.metric("kv_peer_tokens_total") == 640
