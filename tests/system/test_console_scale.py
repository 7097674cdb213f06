"""The console with many workers, many requests and two conversations, in a real Chromium."""

import json
import pathlib
import re
import subprocess
import sys

import httpx
from console_browser import NEEDS_BROWSER, QUESTION, SHIFTS, ask, get, show
from deployment import MODEL

from waiting import PATIENT_S, eventually

pytestmark = NEEDS_BROWSER
LOAD = pathlib.Path(__file__).parents[2] / "benchmarks" / "load.py"


def test_two_models_answer_one_question_side_by_side(deployment, page):
    frontend = deployment.frontend()
    fast = ("--speedup-ratio", "1000")
    frontend.others = [deployment.mocker("--model-name", name, *fast) for name in ("one", "two")]
    eventually(
        lambda: frontend.is_live() and {*frontend.models()} == {"one", "two"}, what="both models"
    )
    show(page, frontend.url, "chat")
    page.get_by_role("button", name="Compare").click()
    panes = [page.get_by_role("region", name=f"Conversation {number}") for number in (1, 2)]
    chosen = [pane.locator("select").input_value() for pane in panes]
    ask(page, QUESTION, num_tokens=8)
    links = [pane.locator(".figures a") for pane in panes]
    for link in links:
        link.wait_for()
    ids = [link.get_attribute("href").rpartition("/")[2] for link in links]
    rows = [get(frontend, f"requests/{each}") for each in ids]

    assert {*chosen} == {"one", "two"}
    assert [row["model"] for row in rows] == chosen
    for pane, row in zip(panes, rows, strict=True):
        assert pane.locator(".turn.user").inner_text() == QUESTION
        assert f"{row['output_tokens']} tokens" in pane.locator(".figures").inner_text()
        assert pane.locator(".turn.assistant .text").inner_text()
    page.get_by_role("button", name="Close").click()
    assert panes[1].count() == 0
    assert panes[0].locator(".turn").count() == 2


def test_thousand_workers_are_shown_page_by_page_and_as_candidates(deployment, page):
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [deployment.mocker("--num-workers", "1000", "--speedup-ratio", "1000")]

    def are_all_ready():
        return frontend.is_live() and get(frontend, "topology")["num_by_state"].get("ready") == 1000

    # each look costs the frontend some milliseconds
    eventually(are_all_ready, what="a thousand workers", every_s=0.5)
    show(page, frontend.url, "topology")
    page.evaluate(SHIFTS)
    page.wait_for_selector("tr[data-worker]")
    # on a busy machine some of them answer late, and are shown as down until they do
    page.locator('[data-tile="Workers"]', has_text=re.compile("^1000$")).wait_for()
    eventually(are_all_ready, what="a thousand workers", every_s=0.5)
    workers = get(frontend, "topology")
    explained = frontend.chat(max_tokens=1, nvext={"extra_fields": ["explanation"]}).json()
    decisions = explained["nvext"]["explanation"]  # one for each attempt

    assert workers["total"] == 1000
    assert page.locator("tr[data-worker]").count() == len(workers["workers"]) == 200
    assert page.evaluate("window.shift") < 0.1
    assert page.get_by_text("The first 200 of 1000 workers").is_visible()
    (row,) = get(frontend, "requests")["rows"]
    page.goto(f"{frontend.url}/#/requests/{row['id']}")
    page.wait_for_selector("[data-candidate]")
    assert decisions[0]["num_candidates"] == 1000
    num_explained = sum(len(decision.get("candidates", ())) for decision in decisions)
    assert page.locator("[data-candidate]").count() == num_explained < 1000


def test_ten_thousand_requests_are_counted_and_the_last_thousand_can_be_paged(deployment, page):
    frontend = deployment.frontend()
    frontend.others = [deployment.mocker("--speedup-ratio", "1000000")]
    frontend.await_models([MODEL])
    show(page, frontend.url, "requests")
    page.evaluate(SHIFTS)
    done = subprocess.run(
        [
            *(sys.executable, LOAD, "--url", frontend.url, "--model", MODEL),
            *("--n", "10000", "--conc", "16"),
        ],
        capture_output=True,
        text=True,
        timeout=4 * PATIENT_S,
    )

    assert json.loads(done.stdout)["errs"] == 0
    page.get_by_text("1 to 50 of 1000").wait_for()
    assert page.evaluate("window.shift") < 0.1
    page.get_by_role("button", name="Older").click()
    page.get_by_text("51 to 100 of 1000").wait_for()
    rows = get(frontend, "requests?offset=50&limit=50")["rows"]
    shown = [each.get_attribute("data-request") for each in page.locator("tr[data-request]").all()]
    assert shown == [row["id"] for row in rows]
    page.get_by_role("link", name="Usage").click()
    page.locator('[data-tile="Requests"]').get_by_text("10.0 k").wait_for()
    counted = httpx.get(f"{frontend.url}/usage", timeout=PATIENT_S).json()["rows"]
    assert sum(row["num_requests"] for row in counted) == 10_000
