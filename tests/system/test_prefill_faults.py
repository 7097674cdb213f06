"""Prefill and decode workers are killed, and clients go, at each point of a prompt's way: nothing is lost, nothing
hangs, no block stays behind, and the counters say what became of it.

The workers are simulated, so that each point can be held on to; blocks carry their names, so that a wrong copy is a
wrong answer.
"""

import asyncio
import concurrent.futures
import itertools
import threading

import pytest
from deployment import UNHURRIED
from split import (
    HOLD_S,
    MAPPED,
    NUM,
    QUICK,
    SLOW,
    SLOW_LINK,
    STAGES,
    Question,
    Split,
    asking,
    num_moved,
    prefills,
    prompt,
    prompts_of,
    start,
    total,
    until_idle,
)

from dynamo.protocols import generate, instances
from dynamo.runtime import component
from waiting import eventually

KILL_EVERY_S = 2


@pytest.fixture
def split(deployment):
    deployment.environ |= UNHURRIED
    return Split(deployment, "mocker")


@pytest.fixture(params=STAGES)
def stage(request):
    return STAGES[request.param]


def test_answers_survive_the_death_of_the_only_prefill_worker(split, stage):
    (prefill,), (decode,) = start(split, stage, 1, 1)
    with asking(split, prompts_of(1)) as answers:
        stage.reached([prefill], [decode])
        prefill.kill()

    assert prefills(decode, "fallback") > 0
    assert prefills(decode, "fallback") + prefills(decode, "remote") == NUM
    assert answers == split.ask_all(prompts_of(1))
    until_idle(decode)


def test_mapped_blocks_are_copied_after_their_worker_died(split):
    (prefill,), (decode,) = start(split, MAPPED, 1, 1)
    with asking(split, prompts_of(1)) as answers:
        MAPPED.reached([prefill], [decode])
        prefill.kill()

    assert prefills(decode, "remote") == NUM
    assert answers == split.ask_all(prompts_of(1))
    until_idle(decode)


def test_answers_survive_the_death_of_one_prefill_worker(split, stage):
    workers, (decode,) = start(split, stage, 2, 1)
    with asking(split, prompts_of(2)) as answers:
        stage.reached(workers, [decode])
        other, prefill = sorted(workers, key=lambda one: one.metric("requests_total"))
        prefill.kill()  # the one that has most of them, or all

    is_copied = stage is STAGES["copied"]
    assert (prefills(decode, "fallback") > 0) == is_copied
    assert (decode.metric("prefill_retries_total") > 0) == (not is_copied)
    assert prefills(decode, "fallback") + prefills(decode, "remote") == NUM
    assert answers == split.ask_all(prompts_of(2))
    until_idle(decode, other)


def test_answers_survive_the_death_of_a_decode_worker(split, stage):
    (prefill,), decode = start(split, stage, 1, 2)
    with asking(split, prompts_of(3)) as answers:
        stage.reached([prefill], decode)
        decode[0].kill()

    assert num_moved(split) > 0
    assert total(decode[1:], "fallback") == 0
    assert answers == split.ask_all(prompts_of(3))
    until_idle(decode[1], prefill)


@pytest.mark.parametrize("where", ["computed", "copied"])
def test_answers_survive_the_death_of_both_kinds_at_once(split, where):
    stage = STAGES[where]
    prefill, decode = start(split, stage, 2, 2)
    with asking(split, prompts_of(4)) as answers:
        stage.reached(prefill, decode)
        prefill[0].kill()
        decode[0].kill()

    assert num_moved(split) > 0
    assert answers == split.ask_all(prompts_of(4))
    until_idle(decode[1], prefill[1])


def test_disconnected_clients_leave_no_block_in_use(split, stage):
    (prefill,), (decode,) = start(split, stage, 1, 1)
    questions = [Question(split.frontend, one) for one in prompts_of(5)]
    stage.reached([prefill], [decode])
    for question in questions:
        question.leave()

    until_idle(decode, prefill)
    assert decode.metric("inflight_requests") == prefill.metric("inflight_requests") == 0
    assert decode.metric("cancellation_total") > 0
    assert split.ask(prompt(600, "after"))


def many_prompts(seed):
    """So many that some must meet at a prefill worker which takes a second for each, however slowly they are sent."""
    return [one for turn in range(3) for one in prompts_of(f"{seed} {turn}")]


def test_full_prefill_queue_means_local_prefill(split):
    prefill = split.prefill(*SLOW, "--max-num-seqs", "1")
    decode = split.decode(*QUICK, "--max-prefill-queue-size", "1")
    split.ready(decode)
    questions, answers = [], []

    def meets_a_full_queue():
        questions.extend(asked := many_prompts(f"6 {len(questions)}"))
        answers.extend(split.ask_all(asked))
        return prefills(decode, "local") > 0

    eventually(meets_a_full_queue, what="a prompt that meets a full queue")

    assert prefills(decode, "remote") > 0
    assert total([decode], "remote") + total([decode], "local") == len(questions)
    assert answers == split.ask_all(questions)
    until_idle(decode, prefill)


def test_refusing_prefill_worker_gets_no_more_prompts(split):
    prefill = split.prefill(*SLOW, "--engine-request-limit", "1")
    decode = split.decode(*QUICK)
    split.ready(decode)
    questions = many_prompts(7)
    answers = split.ask_all(questions)

    assert prefills(decode, "remote") > 0
    assert prefills(decode, "fallback") > 0
    assert answers == split.ask_all(questions)
    until_idle(decode, prefill)


@pytest.mark.parametrize("limit", ["--kv-transfer-timeout-s", "--kv-transfer-patience-s"])
def test_slow_copy_is_given_up(split, limit):
    prefill = split.prefill("--kv-hold-s", "100")
    decode = split.decode(*SLOW_LINK, limit, "1")  # time for all to be sent
    split.ready(decode)
    answers = split.ask_all(prompts_of(8))

    assert prefills(decode, "fallback") == NUM
    assert answers == split.ask_all(prompts_of(8))
    until_idle(decode, prefill)  # it is told that nobody comes for them


def test_answers_survive_failing_copies(split):
    prefill = split.prefill("--kv-hold-s", "100")
    decode = split.decode(*QUICK, "--kv-transfer-fail-every", "2")
    split.ready(decode)
    answers = [split.ask(one) for one in prompts_of(9)]

    assert prefills(decode, "fallback") > 0
    assert answers == split.ask_all(prompts_of(9))
    until_idle(decode, prefill)  # it is told that nobody comes for them


async def put_card(deployment, key, value, told):
    """Keep it in discovery until `told`."""
    settings = component.RuntimeConfig(file_kv=deployment.environ["DYN_FILE_KV"])
    async with await component.DistributedRuntime.open(
        settings, item_type=generate.Output
    ) as runtime:
        await runtime.discovery.put(key, value)
        await asyncio.to_thread(told.wait)


async def cards(deployment):
    settings = component.RuntimeConfig(file_kv=deployment.environ["DYN_FILE_KV"])
    async with await component.DistributedRuntime.open(
        settings, item_type=generate.Output
    ) as runtime:
        return await runtime.discovery.get_prefix(f"{instances.CARDS}dynamo/prefill/generate/")


def test_stale_metadata_of_a_restarted_worker_is_harmless(split, deployment):
    first = split.prefill(*QUICK)
    decode = split.decode(*QUICK)
    split.ready(decode)
    (stale,) = asyncio.run(cards(deployment)).items()
    first.kill()
    second, is_over = split.prefill(*QUICK), threading.Event()
    split.ready(decode, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        telling = threads.submit(asyncio.run, put_card(deployment, *stale, is_over))
        try:
            eventually(lambda: "cannot be used" in decode.log.read_text(), what="it was tried")
            answers = [split.ask(one) for one in prompts_of(10)]
        finally:
            is_over.set()
        telling.result()

    assert prefills(decode, "remote") == NUM
    assert answers == split.ask_all(prompts_of(10))
    until_idle(decode, second)


def serves(worker):
    """Somebody can be asked while the other is gone."""
    return "serving storyteller" in worker.log.read_text()


def test_500_requests_survive_a_killed_worker_every_two_seconds(split):
    paced = ("--speedup-ratio", "1", "--kv-hold-s", str(HOLD_S))
    kinds = {"prefill": split.prefill, "decode": split.decode}
    workers = {kind: [make(*paced) for _ in range(2)] for kind, make in kinds.items()}
    for decode in workers["decode"]:
        split.ready(decode, 2)
    prompts = [prompt(300 + i % 200, i) for i in range(500)]
    is_over, killed = threading.Event(), []

    def keep_killing():
        for kind in itertools.cycle(kinds):
            if is_over.wait(KILL_EVERY_S):
                return
            eventually(lambda kind=kind: all(map(serves, workers[kind])), what="both")
            workers[kind].pop(0).kill()
            killed.append(kind)
            workers[kind].append(kinds[kind](*paced))

    numbers, answers = itertools.count(), {}

    def keep_asking():
        for number in numbers:
            # a quick machine answers 500 before a worker of each kind was killed under load
            if number >= len(prompts) and (set(kinds) <= set(killed) or killing.done()):
                return
            answer = split.ask(prompts[number % len(prompts)], max_tokens=20)
            assert answers.setdefault(number % len(prompts), answer) == answer

    with concurrent.futures.ThreadPoolExecutor(26) as threads:
        killing = threads.submit(keep_killing)
        try:
            for asking_on in [threads.submit(keep_asking) for _ in range(25)]:
                asking_on.result()
        finally:
            is_over.set()
        killing.result()

    sample = range(0, 500, 25)
    again = split.ask_all([prompts[i] for i in sample], max_tokens=20)
    assert [answers[i] for i in sample] == again
    assert {"prefill", "decode"} == set(killed)
    assert num_moved(split) > 0
    everybody = [*workers["prefill"], *workers["decode"]]
    eventually(lambda: all(map(serves, everybody)), what="the last ones serve")
    until_idle(*everybody)
