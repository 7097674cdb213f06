"""Workers that change between prefill and decode while they serve: no answer is cut, and all answers are right."""

import concurrent.futures
import itertools
import signal
import threading

import httpx
from split import ALWAYS, Split, prefills, prompt

from waiting import PATIENT_S, eventually


def change(worker, role):
    answer = httpx.post(f"{worker.url}/engine/role", json={"role": role}, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text


def test_workers_change_roles_under_load_and_no_answer_is_cut(deployment):
    split = Split(deployment)
    first, second, prefill = split.decode(), split.decode(), split.prefill(*ALWAYS)
    for worker in (first, second):
        split.ready(worker)
    prompts = [prompt(length, seed) for seed, length in enumerate((20, 70, 150, 220) * 2)]
    expected = dict(enumerate(split.ask_all(prompts, max_tokens=24)))
    enough, answers = threading.Event(), []

    def ask_until_enough(number):
        while not enough.is_set():
            answers.append((number, split.ask(prompts[number], max_tokens=24)))

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        asking = [pool.submit(ask_until_enough, number) for number in expected]
        try:
            change(second, "prefill")
            change(prefill, "decode")  # each of them has had both roles then
            seeds = itertools.count(1000)  # of prompts that no cache holds

            def has_imported():
                split.ask(prompt(150, next(seeds)))
                return prefills(prefill, "remote") > 0

            eventually(has_imported, what="the one computes prompts for the other")
            second.signal(signal.SIGUSR2)
            prefill.signal(signal.SIGUSR1)
            eventually(
                lambda: (
                    "became a decode worker" in second.log.read_text()
                    and "became a prefill worker" in prefill.log.read_text()
                ),
                what="both have their first role again",
            )
        finally:
            enough.set()
        for each in asking:
            each.result()

    assert len(answers) >= len(prompts)
    assert all(text == expected[number] for number, text in answers)
