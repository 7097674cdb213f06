"""Frontends, two decode workers and a prefill worker over real vLLM, as users start them.

All start at once, as each takes half a minute, and serve every test here; the last two kill some of them. Prompts up to
`LOCAL` tokens are computed by the worker that answers, longer ones by the prefill worker: of what `frontend` is asked,
in router mode kv, it sends them there itself; of what `plain` is asked the worker does that answers.
"""

import concurrent.futures
import importlib.util
import json
import random
import signal

import httpx
import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("vllm and nixl are not installed here: make test-vllm", allow_module_level=True)

from deployment import Deployment

import vllm_models
from waiting import PATIENT_S, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
MODEL = "qwen3-tiny"
BLOCK = 32
LOCAL = 200  # tokens
FLAGS = (
    f"--model-name {MODEL} --enforce-eager --dtype float32 --block-size {BLOCK}"
    " --num-gpu-blocks-override 400 --max-model-len 1024 --max-num-seqs 32"
    " --max-num-batched-tokens 512"
)
GOLDEN = (  # after "New Request ID: ", which every request has
    "Prefilling remotely for request",
    "get_num_new_matched_tokens: num_computed_tokens=0, kv_transfer_params={'do_remote_prefill': True",
    "start_load_kv for request",
    "is still in WAITING_FOR_REMOTE_KVS state.",
    "Finished recving KV transfer for request",
    "update_state_after_alloc: num_external_tokens=0, kv_transfer_params={'do_remote_prefill': False",
)
GOLDEN_PREFILL = (
    "New Prefill Request ID: ",
    "num_computed_tokens=0, kv_transfer_params={'do_remote_decode': True}",
    "request_status=FINISHED_LENGTH_CAPPED, kv_transfer_params={'do_remote_decode': True}",
    "kv transfer params: {'do_remote_prefill': True, 'do_remote_decode': False, 'remote_block_ids': ",
)
START_S = 600.0  # on a busy machine; usually half a minute


class Served:
    """What was started."""

    def __init__(self, directory):
        self.deployment = Deployment(directory)
        self.deployment.environ["DYN_LOG"] = "debug"  # vLLM's too
        model = str(vllm_models.make(directory / "model"))
        flags = ("--model", model, *FLAGS.split())
        limits = ("--max-local-prefill-length", str(LOCAL), "--max-prefill-queue-size", "100")
        decode = ("--disaggregation-mode", "decode", *limits)
        self.workers = [self.deployment.vllm(*flags, *decode) for _ in range(2)]
        self.prefill = self.deployment.vllm(*flags, "--is-prefill-worker")
        self.plain = self.deployment.frontend()
        self.frontend = self.deployment.frontend("--router-mode", "kv", *limits)
        self.frontend.others = [*self.workers, self.prefill]

    def await_all(self):
        served = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
        for frontend in (self.frontend, self.plain):
            self._await(lambda of=frontend: of.models() == [MODEL], "the model")
            self._await(lambda of=frontend: of.metric(served) == 2, "two workers")
        for worker in self.workers:
            self._await(
                lambda log=worker.log: " is connected" in log.read_text(), "the prefill worker"
            )
        told = "by prefill workers of"
        self._await(lambda: told in self.frontend.log.read_text(), "the frontend's prefill worker")

    def _await(self, check, what):
        def is_so():
            for process in self.frontend.others:
                process.check()
            return check()

        eventually(is_so, within_s=START_S, what=what, every_s=0.5)

    def complete(self, token_ids, max_tokens=16, frontend=None, **fields):
        """All that is said."""
        url = (frontend or self.frontend).url
        asked = body(token_ids, max_tokens, **fields)
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, token_ids, max_tokens=16, **fields):
        """Return the answer and the number of cached prompt tokens."""
        said = self.complete(token_ids, max_tokens, **fields)
        assert said["usage"]["completion_tokens"] == max_tokens
        return said["choices"][0]["text"], cached_of(said)

    def ask_all(self, prompts, **fields):
        with concurrent.futures.ThreadPoolExecutor(32) as threads:
            return [text for text, _ in threads.map(lambda one: self.ask(one, **fields), prompts)]

    def ask_by_both(self, prompts):
        """The first half of the frontend that sends prompts ahead, the rest of the other."""
        half = len(prompts) // 2
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            ahead = threads.submit(self.ask_all, prompts[:half])
            late = threads.submit(self.ask_all, prompts[half:], frontend=self.plain)
            return ahead.result() + late.result()

    def forget_prefixes(self):
        httpx.post(f"{self.frontend.url}/clear_kv_blocks", timeout=PATIENT_S).raise_for_status()

    def complete_remotely(self, token_ids, **fields):
        """Complete a prompt from empty caches, of which the frontend hears a moment after the workers have replied."""
        routed, answers = self.routed("remote"), []

        def is_routed_remotely():
            self.forget_prefixes()
            answers.append(self.complete(token_ids, **fields))
            return self.routed("remote") == routed + 1

        eventually(is_routed_remotely, what="the prefill worker computes the prompt")
        return answers[-1]

    def prefills(self, where):
        """How many prompts were computed so."""
        name = f'prefills_total{{where="{where}"}}'
        return sum(worker.metric(name) for worker in self.workers if worker.is_running)

    def routed(self, where):
        """How many prompts the frontend has had computed so."""
        name = "dynamo_frontend_routed_prefills_total"
        return self.frontend.metric(f'{name}{{model="{MODEL}",where="{where}"}}')

    def num_sent_away(self):
        """Return the number of prompts that the prefill worker has received."""
        logs = [process.log.read_text() for process in (self.frontend, *self.workers)]
        return sum(log.count("Prefilling remotely for request") for log in logs)

    def holder(self):
        """The worker that has a request now."""
        found = []
        eventually(
            lambda: found or found.extend(worker for worker in self.workers if is_busy(worker)),
            what="a busy worker",
        )
        return found[0]


def body(token_ids, max_tokens, **fields):
    ways = {"temperature": 0, "nvext": {"ignore_eos": True}}
    return {"model": MODEL, "prompt": token_ids, "max_tokens": max_tokens} | ways | fields


def cached_of(said):
    """Return the number of cached prompt tokens."""
    return said["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_requests(worker):
    return worker.metric("inflight_requests") if worker.is_running else 0


def is_busy(worker):
    return num_requests(worker) > 0


def prompt(seed, num_tokens):
    return random.Random(seed).choices(range(10, 3000), k=num_tokens)


def chunks_of(served, asked):
    """The chunks of a streamed answer, one by one."""
    with (
        httpx.Client(timeout=PATIENT_S) as client,
        client.stream("POST", f"{served.frontend.url}/v1/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("served"))
    try:
        served.await_all()
        yield served
    finally:
        for process in served.frontend.others:
            process.signal(signal.SIGTERM)  # they end as slowly as they start: all at once
        served.deployment.end()


def test_streamed_and_whole_answers_are_equal(served):
    asked = prompt(1, 90)

    whole, _ = served.ask(asked, max_tokens=40)
    counting = {"include_usage": True, "continuous_usage_stats": True}
    pieces = list(chunks_of(served, body(asked, 40, stream=True, stream_options=counting)))
    counts = [piece["usage"]["completion_tokens"] for piece in pieces if text_of([piece])]

    assert text_of(pieces) == whole
    assert counts == sorted(set(counts))  # each brings tokens, several where these came together
    assert len(counts) > 1
    assert counts[-1] == 40


def test_a_chat_is_answered(served):
    answer = served.frontend.chat("Tell me a story", model=MODEL, max_tokens=12)

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_a_prompt_is_routed_to_its_cached_prefix(served):
    prefixes = [prompt(100 + seed, 128) for seed in range(8)]
    for prefix in prefixes:
        assert served.ask(prefix + prompt(1, 20), max_tokens=2)[1] == 0

    found = [served.ask(prefix + prompt(2, 30), max_tokens=2)[1] for prefix in prefixes]

    assert found == [128] * len(prefixes)
    assert all(worker.metric("requests_total") > 0 for worker in served.workers)


def test_a_long_prompt_is_prefilled_remotely_and_cached_there(served):
    before, routed = served.prefills("remote"), served.routed("remote")
    asked = prompt(3, 400)

    first, num_first = served.ask(asked, frontend=served.plain)
    second, num_second = served.ask(asked[:300] + prompt(4, 250), frontend=served.plain)

    assert served.prefills("remote") == before + 2
    assert served.routed("remote") == routed
    assert (num_first, num_second) == (0, 288)
    assert first != second


def test_the_log_names_remote_prefills(served):
    """In the words of Dynamo's users, most of them vLLM's own."""
    served.ask(prompt(7, 350), frontend=served.plain)

    assert any(tells(worker.log.read_text(), GOLDEN) for worker in served.workers)
    assert tells(served.prefill.log.read_text(), GOLDEN_PREFILL)


def tells(log, story):
    """Do its lines follow each other?"""
    at = 0
    for line in story:
        at = log.find(line, at)
        if at < 0:
            return False
    return True


def test_a_kv_aware_frontend_sends_long_prompts_to_prefill_workers(served):
    before, routed, known = served.prefills("remote"), served.routed("remote"), prompt(8, 300)
    fields = {"nvext": {"ignore_eos": True, "extra_fields": ["worker_id", "timing"]}}

    first = served.complete(known, **fields)
    second = served.complete(known + prompt(9, 250), **fields)
    short = served.complete(prompt(10, LOCAL), **fields)

    assert served.prefills("remote") == before + 2
    assert served.routed("remote") == routed + 2
    assert [cached_of(said) for said in (first, second, short)] == [0, 288, 0]
    for said in (first, second):
        ids, timing = said["nvext"]["worker_id"], said["nvext"]["timing"]
        assert ids["prefill_worker_id"] != ids["decode_worker_id"]
        assert timing["prefill_time_ms"] > 0
        assert timing["kv_transfer_time_ms"] > 0
    assert first["nvext"]["timing"]["kv_transfer_blocks"] == 10
    ids = short["nvext"]["worker_id"]
    assert ids["prefill_worker_id"] == ids["decode_worker_id"]
    assert "prefill_time_ms" not in short["nvext"]["timing"]


@pytest.mark.parametrize(
    ("seed", "fields"), [(11, {}), (12, {"temperature": 1.0, "seed": 5}), (13, {"logprobs": 2})]
)
def test_choices_of_a_remote_prefill_equal_local_ones(served, seed, fields):
    """vLLM computes a prompt of several choices where it answers them."""
    asked, routed = prompt(seed, 300), served.routed("remote")

    here = served.complete(asked, n=2, **fields)["choices"]
    assert served.routed("remote") == routed
    there = served.complete_remotely(asked, **fields)["choices"]

    assert len({text_of([{"choices": [one]}]) for one in here}) == (2 if "seed" in fields else 1)
    assert there == here[:1]


def test_many_streams_at_once_are_all_answered(served):
    prompts = [prompt(200 + seed, 20 + 5 * seed) for seed in range(32)]

    texts = served.ask_all(prompts, max_tokens=40)

    assert len(set(texts)) == 32


def test_a_cancelled_answer_leaves_vllms_scheduler(served):
    chunks = chunks_of(served, body(prompt(5, 60), 900, stream=True))
    for _ in range(3):
        next(chunks)
    worker = served.holder()
    chunks.close()

    aborted = "request_status=FINISHED_ABORTED"  # as vLLM's scheduler says
    eventually(lambda: aborted in worker.log.read_text(), what="it is aborted")
    eventually(lambda: worker.metric("kvstats_active_blocks") == 0, what="it is gone")


def test_answers_survive_a_killed_prefill_worker_unchanged(served):
    """Whether the frontend sent the prompts there, or the worker that answers."""
    before, meanwhile = ([prompt(300 + i, 300) for i in range(n, n + 6)] for n in (0, 6))
    num_remote, num_routed = served.prefills("remote"), served.routed("remote")
    remote = served.ask_by_both(before)
    assert served.prefills("remote") == num_remote + 6
    assert served.routed("remote") == num_routed + 3

    num_sent = served.num_sent_away()
    served.prefill.signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        asking = threads.submit(served.ask_by_both, meanwhile)
        eventually(lambda: served.num_sent_away() == num_sent + 6, what="all ask")
        served.prefill.kill_all()
        interrupted = asking.result()
    assert served.prefills("fallback") == served.routed("fallback") == 3
    assert served.prefills("remote") == num_remote + 6

    served.forget_prefixes()
    assert served.ask_all([*before, *meanwhile]) == remote + interrupted


def test_an_answer_survives_its_killed_worker_unchanged(served):
    asked = prompt(6, 100)
    undisturbed, _ = served.ask(asked, max_tokens=300)
    chunks = chunks_of(served, body(asked, 300, stream=True))
    begun = [next(chunks) for _ in range(5)]

    served.holder().kill_all()
    text = text_of([*begun, *chunks])

    assert text == undisturbed
    assert "Stream disconnected... recreating stream..." in served.frontend.log.read_text()
