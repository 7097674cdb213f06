"""A frontend that keeps prompts where they are answered while the prefill workers are busy."""

import contextlib
import http.client
import json
import re

import httpx
from deployment import MODEL, chat

from waiting import PATIENT_S, eventually

CONDITION = json.dumps({"policy": "prefill_load", "prefill_busy_threshold": 0})
ROUTED = re.compile(r'^dynamo_frontend_routed_prefills_total\{.*where="(\w+)".*\} (\d+)', re.M)


def routed(frontend):
    """How many prompts were computed where."""
    page = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
    return {where: int(number) for where, number in ROUTED.findall(page)}


def test_prompt_stays_local_while_the_prefill_worker_is_busy(deployment):
    frontend = deployment.frontend(
        "--router-mode", "kv", "--router-conditional-disagg", "--router-conditional-disagg-config", CONDITION,
        "--prefill-timeout-s", "600",
    )  # fmt: skip
    # A step takes 8 tokens of a prompt, so the first one is there until its client leaves: a minute.
    slow = ("--tick-ms", "300", "--max-num-batched-tokens", "8", "--max-num-seqs", "8")
    prefill = deployment.mocker("--is-prefill-worker", *slow)
    decode = deployment.mocker("--disaggregation-mode", "decode")
    frontend.others = [prefill, decode]
    frontend.await_models([MODEL])
    for log, words in ((frontend.log, "by prefill workers of"), (decode.log, " is connected")):
        eventually(lambda log=log, words=words: words in log.read_text(), what=words)

    body = json.dumps(chat("Tell me a story. " * 300, max_tokens=2))
    client = http.client.HTTPConnection(frontend.url.removeprefix("http://"), timeout=PATIENT_S)
    with contextlib.closing(client):
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        eventually(lambda: prefill.metric("inflight_requests") == 1, what="a prompt there")
        second = frontend.chat("And another one", max_tokens=2)
        while_busy = routed(frontend)
        still_there = prefill.metric("inflight_requests")
    eventually(lambda: prefill.metric("inflight_requests") == 0, what="its client has left")
    third = frontend.chat("And a last one", max_tokens=2)

    assert (second.status_code, third.status_code) == (200, 200)
    assert (still_there, while_busy["local"]) == (1, 1), frontend.log.read_text()
    assert routed(frontend) == while_busy | {"remote": 1}
