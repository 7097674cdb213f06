"""The console in a real Chromium: each value that it shows is the one of the API, and it is accessible.

The browser's own errors (a blocked script, a failed request) fail a test.
"""

import importlib.util
import itertools
import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import httpx
import pytest
from deployment import MODEL, newly_asked

import ports
from dynamo.engine import native
from dynamo.launch import state
from waiting import PATIENT_S, eventually

CHROMIUM = shutil.which("chromium")
PLAYWRIGHT = importlib.util.find_spec("playwright")
AXE = importlib.util.find_spec("axe_core_python")
LOAD = pathlib.Path(__file__).parents[2] / "benchmarks" / "load.py"
VIEWS = ("chat", "topology", "requests", "cache", "metrics", "planner", "models", "usage", "logs")
QUESTION = (
    "Tell me a story about a brave cat that crossed the river and met an old and friendly bear"
)
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice-1"
[[keys]]
name = "root"
key = "sk-root-1"
admin = true
"""
# The sum of layout shifts in the worst window of at most 5 s without a pause of 1 s, as browsers report it.
SHIFTS = """() => { window.shift = 0; let sum = 0, first = 0, last = 0; new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) {
    if (entry.startTime - last > 1000 || entry.startTime - first > 5000) { sum = 0; first = entry.startTime; }
    last = entry.startTime; sum += entry.value; window.shift = Math.max(window.shift, sum);
  }
}).observe({type: "layout-shift", buffered: true}); }"""

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: as root on Debian, tests/install_services.sh"
    ),
    pytest.mark.skipif(PLAYWRIGHT is None, reason="needs playwright: make setup"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api  # an extra

    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser):
    """A page that fails the test if the browser reports an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENT_S * 1000)
    opened.problems = []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on(
        "console",
        lambda line: opened.problems.append(line.text) if line.type == "error" else None,
    )
    yield opened
    context.close()

    assert opened.problems == []


def show(page, url, view):
    if page.url.startswith(
        f"{url}/"
    ):  # `goto` waits for ever if the page changes its hash meanwhile
        page.evaluate("view => { location.hash = `#/${view}` }", view)
    else:
        page.goto(f"{url}/#/{view}")
    page.wait_for_selector(f"main.view-{view} h1")


def get(frontend, path):
    """What the console's API answers."""
    return httpx.get(f"{frontend.url}/console/api/{path}", timeout=PATIENT_S).json()


def ask(page, question, *, num_tokens=48):
    """Ask in the chat, and return once the answer is complete."""
    number = page.locator(".turn.assistant").count()
    if number == 0:
        page.get_by_text("Parameters").click()
        page.get_by_label("Most tokens").fill(str(num_tokens))
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .figures").nth(number).get_by_text(
        "prompt tokens cached"
    ).wait_for()
    page.get_by_role("button", name="Send").wait_for()


def violations(page):
    """What axe finds against WCAG 2.1 AA."""
    source = pathlib.Path(AXE.submodule_search_locations[0], "axe.min.js").read_text()
    page.evaluate(source)
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    found = page.evaluate("rules => axe.run(document, rules)", rules)["violations"]
    return [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found]


def test_second_question_is_cached_and_the_console_says_why(deployment, page):
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [deployment.mocker("--block-size", "16") for _ in range(2)]
    frontend.await_models([MODEL])
    show(page, frontend.url, "chat")
    page.evaluate(SHIFTS)
    ask(page, QUESTION)
    ask(page, "And then?")
    page.locator(".figures a").nth(1).click()
    page.locator("[data-candidate]").first.wait_for()
    request_id = page.url.rpartition("/")[2]
    row = httpx.get(f"{frontend.url}/console/api/requests/{request_id}", timeout=PATIENT_S).json()

    tile = lambda name: page.locator(f'[data-tile="{name}"]').inner_text()  # noqa: E731
    assert row["cached_tokens"] > 0
    assert tile("Prompt tokens") == str(row["prompt_tokens"])
    assert tile("Output tokens") == str(row["output_tokens"])
    assert tile("Worker") == row["worker"][-6:]
    shown = {
        one.get_attribute("data-candidate"): one.locator("td").nth(1).inner_text()
        for one in page.locator("[data-candidate]").all()
    }
    (decision,) = row["decisions"]
    assert shown == {one["instance"]: f"{one['cost']:.1f}" for one in decision["candidates"]}
    chosen = page.locator("tr.chosen").get_attribute("data-candidate")
    assert chosen == row["worker"] == decision["candidates"][0]["instance"]
    assert page.evaluate("window.shift") < 0.1

    for view in VIEWS:
        show(page, frontend.url, view)
        page.wait_for_selector(".tiles, .card, .ask, .log")
        if AXE is not None:
            assert violations(page) == [], view
    (model,) = httpx.get(f"{frontend.url}/console/api/models", timeout=PATIENT_S).json()["models"]
    show(page, frontend.url, "models")
    page.get_by_text("Chat template", exact=True).click()
    assert page.locator("details pre").text_content() == model["chat_template"]
    page.emulate_media(color_scheme="dark")
    show(page, frontend.url, "requests")
    page.wait_for_selector(".tiles")
    if AXE is not None:
        assert violations(page) == []


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
    eventually(
        lambda: (
            frontend.is_live() and get(frontend, "topology")["num_by_state"].get("ready") == 1000
        ),
        what="a thousand workers",
        every_s=0.5,  # each look costs the frontend some milliseconds
    )
    show(page, frontend.url, "topology")
    page.evaluate(SHIFTS)
    page.wait_for_selector("tr[data-worker]")
    workers = get(frontend, "topology")
    explained = frontend.chat(max_tokens=1, nvext={"extra_fields": ["explanation"]}).json()
    decisions = explained["nvext"]["explanation"]  # one for each attempt

    assert workers["total"] == workers["num_by_state"]["ready"] == 1000
    assert page.locator('[data-tile="Workers"]').inner_text() == "1000"
    assert page.locator("tr[data-worker]").count() == len(workers["workers"]) == 200
    assert page.evaluate("window.shift") < 0.1
    assert page.get_by_text("The first 200 of 1000 workers").is_visible()
    (row,) = get(frontend, "requests")["rows"]
    page.goto(f"{frontend.url}/#/requests/{row['id']}")
    page.wait_for_selector("[data-candidate]")
    assert decisions[0]["num_candidates"] == 1000
    num_explained = sum(len(decision["candidates"]) for decision in decisions)
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


def test_lost_worker_is_shown_while_its_answer_goes_on(deployment, page):
    frontend = deployment.frontend("--router-mode", "kv")
    workers = [deployment.mocker() for _ in range(2)]
    frontend.others = list(workers)
    frontend.await_models([MODEL])
    show(page, frontend.url, "topology")
    page.wait_for_selector('tr[data-state="ready"] >> nth=1')
    rows = httpx.get(f"{frontend.url}/console/api/topology", timeout=PATIENT_S).json()["workers"]
    assert {one.get_attribute("data-worker") for one in page.locator("tr[data-worker]").all()} == {
        one["instance"] for one in rows
    }
    with (
        newly_asked(workers) as asked,
        frontend.stream("Tell me a story", max_tokens=1000) as lines,
    ):
        next(lines)
        # the worker with the request: it alone has something in flight
        busy = page.locator("tr[data-worker]").filter(
            has=page.locator("td:nth-child(5)", has_text="1")
        )
        busy.first.wait_for()
        instance = busy.first.get_attribute("data-worker")
        asked().kill()
        page.wait_for_selector(f'tr[data-worker="{instance}"]:not([data-state="ready"])')
        assert list(lines)[-1] == "[DONE]"
    show(page, frontend.url, "requests")
    page.get_by_text(re.compile("moved 1×")).wait_for()
    row = httpx.get(f"{frontend.url}/console/api/requests", timeout=PATIENT_S).json()["rows"][0]

    assert (row["state"], row["num_migrations"], row["output_tokens"]) == ("done", 1, 1000)
    assert row["worker"] != instance


def test_topology_draws_frontends_tiers_and_transfers_and_tells_what_leaves(deployment, page):
    frontend, other = (deployment.frontend("--router-mode", "kv") for _ in range(2))
    prefill = deployment.mocker("--is-prefill-worker", "--kvbm-host-blocks", "64")
    decode = deployment.mocker("--disaggregation-mode", "decode")
    frontend.others = [other, prefill, decode]
    frontend.await_models([MODEL])
    eventually(lambda: "by prefill workers of" in frontend.log.read_text(), what="a way")
    eventually(lambda: " is connected" in decode.log.read_text(), what="a connection")
    numbers = itertools.count()

    def goes_by_the_prefill_worker():
        assert frontend.chat(f"{next(numbers)} {QUESTION * 60}", max_tokens=2).status_code == 200
        return get(frontend, "requests")["rows"][0].get("prefill_worker")

    eventually(goes_by_the_prefill_worker, what="a prompt that another worker computes")
    show(page, frontend.url, "topology")
    page.wait_for_selector("tr[data-pair]")
    page.wait_for_selector("tr[data-process] >> nth=1")
    api = get(frontend, "topology")
    (transfer,) = api["transfers"]
    (computing,) = [row for row in api["workers"] if row["role"] == "prefill"]
    row_of = lambda worker: page.locator(f'tr[data-worker="{worker}"]')  # noqa: E731
    shown = page.locator("tr[data-process]")

    assert [each.get_attribute("data-process") for each in shown.all()] == [
        each["instance"] for each in api["processes"]
    ]
    assert api["num_processes"] == {"frontend": 2}
    assert transfer["prefill"] == computing["instance"]
    assert page.locator("[data-transfer]").get_attribute("data-transfer") == (
        page.locator("tr[data-pair]").get_attribute("data-pair")
    )
    assert row_of(computing["instance"]).locator('[data-name="Tiers"]').inner_text() == ", ".join(
        computing["tiers"]
    )
    assert "device" in computing["tiers"]
    httpx.post(f"{prefill.url}/engine/sleep", timeout=PATIENT_S)
    row_of(computing["instance"]).get_by_text("asleep", exact=True).wait_for()
    with frontend.stream("Tell me a story", max_tokens=400) as lines:
        next(lines)
        decode.signal(signal.SIGTERM)
        row_of(transfer["decode"]).get_by_text("draining", exact=True).wait_for()
        assert page.locator("svg g.draining").count() == 1
        if AXE is not None:
            assert violations(page) == []
        assert list(lines)[-1] == "[DONE]"
    row_of(transfer["decode"]).get_by_text("gone", exact=True).wait_for()
    other.kill()
    shown.nth(1).wait_for(state="detached")


def test_models_on_demand_are_shown_before_they_are_loaded(deployment, page, tmp_path):
    paths = [tmp_path / name for name in ("alpha", "beta")]
    for path in paths:
        shutil.copytree(f"{native.__path__[0]}/storyteller", path)
    deployment.environ[state.HOME_VARIABLE] = str(tmp_path / "home")
    url = f"http://127.0.0.1:{(port := ports.reserve())}"
    process = deployment.run(
        "dynamo.cli", "serve", "--http-port", str(port), *map(str, paths), "--engine", "mocker",
        "--memory-budget-gb", "4", "--pin", "alpha",
    )  # fmt: skip
    list_models = lambda: httpx.get(f"{url}/console/api/models", timeout=PATIENT_S).json()["models"]  # noqa: E731
    eventually(lambda: "curl " in process.log.read_text(), what="a start")
    eventually(lambda: list_models()[0]["num_workers"] == 1, what="the pinned model")
    show(page, url, "models")
    cards = {name: page.locator(f'[data-model="{name}"]') for name in ("alpha", "beta")}
    cards["alpha"].get_by_text("loaded, and stays loaded").wait_for()
    cards["beta"].get_by_text("unloaded: a request waits").wait_for()
    api = {row["name"]: row for row in list_models()}

    assert [api[name]["num_workers"] for name in ("alpha", "beta")] == [1, 0]
    assert f"about {round(api['beta']['estimate_s'])} s" in cards["beta"].inner_text()
    if AXE is not None:
        assert violations(page) == []
    cards["beta"].get_by_role("button", name="Load", exact=True).click()
    cards["beta"].get_by_text("loaded", exact=True).wait_for()
    cards["beta"].get_by_role("button", name="Pin", exact=True).click()
    cards["beta"].get_by_text("loaded, and stays loaded").wait_for()
    cards["beta"].get_by_role("button", name="Unpin", exact=True).click()
    cards["beta"].get_by_role("button", name="Unload", exact=True).click()
    cards["beta"].get_by_text("beta is not unloaded: it stays for 30 s, and has").wait_for()

    assert len(page.problems) == 1
    assert "409 (Conflict)" in page.problems.pop()  # Chromium reports the refusal as an error, too


def test_nothing_is_shown_without_a_key_and_a_key_sees_its_own(deployment, page, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    frontend = deployment.frontend("--api-keys-file", str(path))
    frontend.others = [deployment.mocker()]
    root = {"authorization": "Bearer sk-root-1"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def has_answered():
        return httpx.post(
            f"{frontend.url}/v1/chat/completions", json=body, headers=root, timeout=PATIENT_S
        ).is_success

    eventually(frontend.is_live, what="a frontend")
    eventually(has_answered, what="an answer", every_s=0.2)
    page.goto(frontend.url)
    page.get_by_label("API key").wait_for()
    page.problems.clear()  # the browser reports the 401 that the page asks for

    assert MODEL not in page.locator("body").inner_text()
    page.get_by_label("API key").fill("sk-alice-1")
    page.keyboard.press("Enter")
    ask(page, "Hello", num_tokens=4)
    page.get_by_role("link", name="Requests").click()
    page.wait_for_selector("tr[data-request]")
    keys = {
        row.get("key")
        for row in httpx.get(
            f"{frontend.url}/console/api/requests", headers=root, timeout=PATIENT_S
        ).json()["rows"]
    }

    assert keys >= {"root", "alice"}
    assert page.locator("tr[data-request]").count() == 1
    assert "alice" in page.locator("tr[data-request]").inner_text()
    assert page.get_by_role("link", name="Logs").count() == 0


def test_view_is_marked_in_the_row_of_views_of_a_phone(deployment, page):
    frontend = deployment.frontend()
    frontend.others = [deployment.mocker("--block-size", "16")]
    frontend.await_models([MODEL])
    page.set_viewport_size({"width": 390, "height": 800})
    for view in ("logs", "chat"):
        show(page, frontend.url, view)
        left, right = page.locator("nav [aria-current]").evaluate(
            "link => [link.getBoundingClientRect().left, link.getBoundingClientRect().right]"
        )
        assert left >= 0
        assert right <= 390


def test_planner_shows_its_decisions_and_a_simulated_future(deployment, page):
    frontend = deployment.frontend()
    planner = deployment.run(
        "dynamo.planner", "--environment", "local", "--backend", "mocker", "--model-name", MODEL,
        "--frontend-url", frontend.url, "--planner-port", "0", "--adjustment-interval", "0.5",
        "--max-workers", "4", "--worker-flags", "--num-gpu-blocks-override 40 --block-size 64 --tick-ms 20",
        "--startup-time", "20",
    )  # fmt: skip
    frontend.others = [planner]
    frontend.await_models([MODEL])
    url = f"{frontend.url}/console/api/planner"
    ask_api = lambda **query: httpx.get(url, params=query, timeout=PATIENT_S).json()["planners"]  # noqa: E731
    with frontend.stream("Tell me a story. " * 120, max_tokens=1400, ignore_eos=True) as lines:
        next(lines)
        eventually(
            lambda: ask_api()[0]["decisions"][0].get("kv_usage", 0) > 0.1, what="load in a decision"
        )
        show(page, frontend.url, "planner")
        page.wait_for_selector("tr[data-decision]")
        row = page.locator("tr[data-decision]").first
        # in one go: the next decision takes the place of the first row
        decided_at, *shown = row.evaluate(
            "row => [Number(row.dataset.decision), ...[...row.cells].map(cell => cell.innerText)]"
        )
        decisions = ask_api()[0]["decisions"]
        (decision,) = [each for each in decisions if each["time"] == decided_at]
        before, after = decision["present"]["decode"], decision["replicas"]["decode"]

        assert shown[1] == decision["outcome"]
        assert shown[3] == (str(after) if before == after else f"{before} → {after}")
        assert shown[4] == f"{decision['requests_per_s']:.2f}"
        assert (
            shown[5] == f"{math.floor(decision['kv_usage'] * 100 + 0.5)} %"
        )  # as JavaScript rounds
        assert shown[6] == decision["reason"]
        page.get_by_label("Times the present load").fill("20")
        page.get_by_role("button", name="Simulate").click()
        future = page.get_by_role("region", name="Changes under 20 × the load")
        future.locator("tr[data-decision]").first.wait_for()
        changes = [each.inner_text() for each in future.locator("td:nth-child(4)").all()]

        assert changes[0] == "1 → 2"
        assert changes[-1].endswith("→ 4")
        steps = ask_api(factor=20)[0]["what_if"]
        assert {each["outcome"] for each in steps} == {"up"}
        assert steps[-1]["replicas"] == {"prefill": 0, "decode": 4}
