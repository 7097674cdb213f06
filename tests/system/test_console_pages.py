"""The console in a real Chromium: each value that it shows is the one of the API, and it is accessible.

The browser's own errors (a blocked script, a failed request) fail a test.
"""

import itertools
import math
import re
import shutil
import signal

import httpx
from console_browser import AXE, NEEDS_BROWSER, QUESTION, SHIFTS, ask, get, show, violations
from deployment import MODEL

import ports
from dynamo.engine import native
from dynamo.launch import state
from waiting import PATIENT_S, eventually

pytestmark = NEEDS_BROWSER
VIEWS = ("chat", "topology", "requests", "cache", "metrics", "planner", "models", "usage", "logs")
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice-1"
[[keys]]
name = "root"
key = "sk-root-1"
admin = true
"""


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


def test_lost_worker_is_shown_while_its_answer_goes_on(deployment, page):
    frontend = deployment.frontend("--router-mode", "kv")
    doomed = deployment.mocker("--tick-ms", "300")  # its answer lasts until the page has shown it
    frontend.others = [doomed]
    frontend.await_models([MODEL])
    show(page, frontend.url, "topology")
    page.wait_for_selector('tr[data-state="ready"]')
    with frontend.stream("Tell me a story", max_tokens=1000) as lines:
        next(lines)
        frontend.others.append(deployment.mocker("--speedup-ratio", "1000"))
        page.wait_for_selector('tr[data-state="ready"] >> nth=1')
        rows = get(frontend, "topology")["workers"]
        shown = page.locator("tr[data-worker]").all()
        assert {one.get_attribute("data-worker") for one in shown} == {
            one["instance"] for one in rows
        }
        # the worker with the request: it alone has something in flight
        busy = page.locator("tr[data-worker]").filter(
            has=page.locator("td:nth-child(5)", has_text="1")
        )
        busy.first.wait_for()
        instance = busy.first.get_attribute("data-worker")
        doomed.kill()
        page.wait_for_selector(f'tr[data-worker="{instance}"]:not([data-state="ready"])')
        assert list(lines)[-1] == "[DONE]"
    show(page, frontend.url, "requests")
    page.get_by_text(re.compile("moved 1×")).wait_for()
    row = httpx.get(f"{frontend.url}/console/api/requests", timeout=PATIENT_S).json()["rows"][0]

    assert (row["state"], row["num_migrations"], row["output_tokens"]) == ("done", 1, 1000)
    assert row["worker"] != instance
    page.locator(f'tr[data-request="{row["id"]}"] a').click()
    loss = page.locator('[data-kind="migration"]').inner_text()
    assert loss.startswith("After the loss of its worker: another worker goes on.")
    assert f"instance {instance} was lost" in loss


def test_topology_draws_frontends_tiers_and_transfers_and_tells_what_leaves(deployment, page):
    frontend, other = (deployment.frontend("--router-mode", "kv") for _ in range(2))
    prefill = deployment.mocker("--is-prefill-worker", "--kvbm-host-blocks", "64")
    patient = ("--tick-ms", "100", "--graceful-shutdown-timeout", "600")
    decode = deployment.mocker("--disaggregation-mode", "decode", *patient)
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
    with (
        frontend.stream("Tell me a story", max_tokens=1900, ignore_eos=True) as lasting,
        frontend.stream("Tell me another", max_tokens=40) as lines,
    ):
        next(lasting)
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


def test_request_shows_where_its_prompt_was_computed_and_why(deployment, page):
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [
        deployment.mocker("--is-prefill-worker"),
        deployment.mocker("--disaggregation-mode", "decode"),
    ]
    frontend.await_models([MODEL])
    decode = frontend.others[1]
    eventually(lambda: "by prefill workers of" in frontend.log.read_text(), what="a way")
    eventually(lambda: " is connected" in decode.log.read_text(), what="a connection")
    explained = {"nvext": {"extra_fields": ["explanation"]}, "max_tokens": 2}
    assert frontend.chat(QUESTION, **explained).status_code == 200
    request_id = get(frontend, "requests")["rows"][0]["id"]
    decisions = get(frontend, f"requests/{request_id}")["decisions"]
    page.goto(f"{frontend.url}/#/requests/{request_id}")
    shown = page.locator('[data-kind="prefill"]')
    shown.wait_for()

    assert [row.get("kind", "worker") for row in decisions] == ["prefill", "worker"]
    assert shown.inner_text() == (
        f"Prompt computed: by the worker that answers. Policy LengthPolicy: {decisions[0]['reason']}."
    )
    assert page.locator("tr.chosen").count() == 1
    if AXE is not None:
        assert violations(page) == []


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

    page.get_by_role("button", name="Sign out alice").click()
    page.get_by_label("API key").fill("sk-root-1")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Chat").click()
    page.locator("#question").wait_for()
    assert page.locator(".turn").count() == 0  # alice's conversation


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


def test_long_name_of_a_model_makes_no_page_wider_than_a_phone(deployment, page):
    name = "organisation/a-model-with-a-name-that-goes-on-and-on-Instruct-FP8-quantized-by-somebody"
    frontend = deployment.frontend()
    frontend.others = [deployment.mocker("--model-name", name)]
    frontend.await_models([name])
    page.set_viewport_size({"width": 390, "height": 800})
    for view in ("chat", "metrics", "models", "topology"):
        show(page, frontend.url, view)
        page.get_by_text(name).first.wait_for(state="attached")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 390


def test_planner_shows_its_decisions_and_a_simulated_future(deployment, page):
    frontend = deployment.frontend()
    planner = deployment.run(
        "dynamo.planner", "--environment", "local", "--backend", "mocker", "--model-name", MODEL,
        "--frontend-url", frontend.url, "--planner-port", "0", "--adjustment-interval", "0.5",
        "--max-workers", "4", "--worker-flags", "--num-gpu-blocks-override 40 --block-size 64 --tick-ms 300",
        "--startup-time", "20",
        "--prefill-queue-scale-up-threshold", "99",  # one prompt must not start a second worker beforehand
    )  # fmt: skip
    frontend.others = [planner]
    frontend.await_models([MODEL])
    url = f"{frontend.url}/console/api/planner"
    ask_api = lambda **query: httpx.get(url, params=query, timeout=PATIENT_S).json()["planners"]  # noqa: E731
    with frontend.stream("Tell me a story. " * 120, max_tokens=1400, ignore_eos=True) as lines:
        next(lines)  # the rest takes minutes: the load lasts for as long as the page is looked at
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
