"""A frontend that keeps prompts where they are answered while the prefill workers are busy."""

import concurrent.futures
import json
import re

import httpx
from deployment import MODEL

from waiting import PATIENT_S, eventually

CONDITION = json.dumps({"policy": "prefill_load", "prefill_busy_threshold": 0})
ROUTED = re.compile(r'^dynamo_frontend_routed_prefills_total\{.*where="(\w+)".*\} (\d+)', re.M)


def routed(frontend):
    """How many prompts were computed where."""
    page = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
    return {where: int(number) for where, number in ROUTED.findall(page)}


def test_prompt_stays_local_while_the_prefill_worker_is_busy(deployment):
    frontend = deployment.frontend(
        "--router-mode", "kv", "--router-conditional-disagg", "--router-conditional-disagg-config", CONDITION
    )  # fmt: skip
    prefill = deployment.mocker("--is-prefill-worker", "--tick-ms", "1500")
    decode = deployment.mocker("--disaggregation-mode", "decode")
    frontend.others = [prefill, decode]
    frontend.await_models([MODEL])
    for log, words in ((frontend.log, "by prefill workers of"), (decode.log, " is connected")):
        eventually(lambda log=log, words=words: words in log.read_text(), what=words)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(frontend.chat, "Tell me a story", max_tokens=2)
        eventually(lambda: prefill.metric("inflight_requests") == 1, what="a prompt there")
        second = frontend.chat("And another one", max_tokens=2)
        while_busy = routed(frontend)
        assert first.result().status_code == 200
    third = frontend.chat("And a last one", max_tokens=2)

    assert (second.status_code, third.status_code) == (200, 200)
    assert while_busy["local"] == 1
    assert routed(frontend) == while_busy | {"remote": 2}
