"""Prefill workers and decode workers as processes of their own: same answers, and nothing lost when one goes."""

import concurrent.futures
import random
import signal

import pytest
from deployment import MODEL, Deployment, eventually

ALWAYS = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")
WORDS = "the brave cat saw a small bird near old tree and little dog ran fast home".split()


def story(num_words, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


class Split:
    """A frontend, and workers of both kinds."""

    def __init__(self, deployment):
        self.deployment = deployment
        self.frontend = deployment.frontend()

    def prefill(self, *flags):
        return self._worker("--is-prefill-worker", *flags)

    def decode(self, *flags):
        return self._worker("--disaggregation-mode", "decode", *ALWAYS, *flags)

    def _worker(self, *flags):
        worker = self.deployment.native(*flags)
        self.frontend.others.append(worker)
        return worker

    def ready(self, decode, num_prefill=1):
        self.frontend.await_models([MODEL])
        text = "is connected"
        eventually(
            lambda: decode.log.read_text().count(text) >= num_prefill,
            within_s=30,
            what=f"{num_prefill} prefill workers are connected",
        )

    def ask(self, text, max_tokens=8, **fields):
        answer = self.frontend.chat(text, max_tokens=max_tokens, temperature=0, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]


def prefills(decode, where):
    import httpx

    for row in httpx.get(f"{decode.url}/metrics", timeout=5).text.splitlines():
        if row.startswith(f'dynamo_component_prefills_total{{where="{where}"}}'):
            return float(row.rpartition(" ")[2])
    raise AssertionError(where)


@pytest.fixture
def split(tmp_path):
    deployment = Deployment(tmp_path)
    yield Split(deployment)
    deployment.end()


def test_smoke(split):
    decode, prefill = split.decode(), split.prefill()
    split.ready(decode)
    print(split.ask(story(100)))
    print(prefills(decode, "remote"), prefills(decode, "local"), prefills(decode, "fallback"))
    print(decode.log.read_text())
    print(prefill.log.read_text())
    assert 0
