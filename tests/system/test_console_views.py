"""The console's views whose stories stand nowhere else: what they show is what their API says, in a real Chromium."""

import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest
from console_browser import NEEDS_BROWSER, QUESTION, SHIFTS, ask, get, show
from deployment import MODEL

import ports
from dynamo.engine import native
from waiting import PATIENT_S, eventually

pytestmark = NEEDS_BROWSER
TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'
ANSWER = (
    "<think>first the river</think>Then"
    '<tool_call>{"name": "look", "arguments": {"at": "the river"}}</tool_call>'
)


def cells(row):
    return [each.inner_text() for each in row.locator("td").all()]


def count(value):
    """Return a number as the console shows small ones."""
    return f"{value:.1f}" if value % 1 else str(round(value))


@pytest.fixture
def served(deployment, page):
    """A frontend with two workers, after two questions in its chat."""
    frontend = deployment.frontend("--router-mode", "kv")
    slowly = ("--block-size", "16", "--tick-ms", "100")  # so that the page sees an answer run
    frontend.others = [deployment.mocker(*slowly) for _ in range(2)]
    frontend.await_models([MODEL])
    show(page, frontend.url, "chat")
    page.evaluate(SHIFTS)
    ask(page, QUESTION, num_tokens=16)
    ask(page, "And then?")
    return frontend


def check_metrics(served, page):
    """Compare what the page shows with points that it had from the API; return how many questions this took."""
    show(page, served.url, "metrics")
    page.locator(".chart canvas").nth(5).wait_for()
    num_inflight = page.locator('[data-tile="In flight"]')
    speed = page.locator('[data-tile="Output tokens/s"]')
    with served.stream("Tell me a story", max_tokens=1900, ignore_eos=True) as lines:
        next(lines)
        eventually(lambda: num_inflight.inner_text() == "1", what="the request in flight")
    # its client has left: it counts as failed
    shown = []

    def is_fast():  # in an interval in which an answer has ended
        assert served.chat(max_tokens=2).status_code == 200
        shown.append(speed.inner_text())
        return shown[-1] != "0"

    eventually(is_fast, what="the tokens of the last interval", every_s=0.5)
    points = get(served, "metrics")["points"]  # those, too, that came after what is shown
    assert 1 in [point["num_inflight"] for point in points]
    assert shown[-1] in [count(point["output_tokens_per_s"]) for point in points]
    return 1 + len(shown)


def test_kv_map_metrics_usage_and_logs_show_what_their_api_says(served, page):
    show(page, served.url, "cache")
    page.locator("tr[data-prefix]").first.wait_for()
    eventually(lambda: get(served, "cache")["prefixes"][0]["blocks_by_tier"], what="stored blocks")
    cache = get(served, "cache")
    held = page.locator("tr[data-prefix]").first.locator(".tier")
    held.first.wait_for()

    assert page.locator('[data-tile="Prompt tokens"]').inner_text() == str(cache["prompt_tokens"])
    assert f"{cache['cached_tokens']} tokens were cached" in page.locator(".tiles").inner_text()
    rows = page.locator("tr[data-prefix]").all()
    assert [(row.get_attribute("data-prefix"), *cells(row)[2:4]) for row in rows] == [
        (each["id"], str(each["num_blocks"]), str(each["num_prompts"]))
        for each in cache["prefixes"]
    ]
    (tier, by_worker), *_ = cache["prefixes"][0]["blocks_by_tier"].items()
    assert f"{max(by_worker.values())} {tier}" in [each.inner_text().strip() for each in held.all()]

    num_requests = str(2 + check_metrics(served, page))
    show(page, served.url, "usage")
    table = page.get_by_role("region", name="Usage")
    table.wait_for()
    eventually(
        lambda: num_requests in cells(table.locator("tbody tr").first), what="the last request"
    )
    (used,) = httpx.get(f"{served.url}/usage", timeout=PATIENT_S).json()["rows"]
    row = cells(table.locator("tbody tr").first)
    assert row[:1] + row[3:7] == [used["day"], MODEL, "chat_completions", num_requests, "1"]
    assert row[7:9] == [str(used["prompt_tokens"]), str(used["cached_tokens"])]
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save as CSV").click()
    assert saving.value.path().read_text().splitlines()[1].startswith(f"{used['day']},")

    show(page, served.url, "logs")
    page.locator(".log li").first.wait_for()
    logged = [line["message"] for line in get(served, "log")["lines"]]
    first = page.locator(".log li").last.inner_text()
    assert any(message in first for message in logged)
    page.get_by_label("Contains").fill("no such line")
    page.get_by_text("No line matches.").wait_for()
    assert page.evaluate("window.shift") < 0.1


def test_lines_of_a_restarted_frontend_are_shown(deployment, page):
    port = ports.reserve()
    first = deployment.frontend(port=port)
    eventually(first.is_live, what="a frontend")
    show(page, first.url, "logs")
    page.locator(".log li").first.wait_for()
    num_lines = get(first, "log")["lines"][-1]["number"]
    first.kill()
    second = deployment.frontend(port=port)
    eventually(second.is_live, what="the next frontend")
    lines = get(second, "log")["lines"]
    assert lines[-1]["number"] <= num_lines  # it logs no more than the first one

    eventually(
        lambda: page.locator(".log li").count() == num_lines + len(lines),
        what="the lines of both",
        every_s=0.5,
    )
    page.problems.clear()  # the browser reports the broken stream, and that nobody answered


def test_list_of_requests_in_flight_follows_them(served, page):
    show(page, served.url, "requests")
    page.get_by_label("Show").select_option("open")
    page.get_by_text("No such request.").wait_for()
    with served.stream("Tell me a story", max_tokens=1900, ignore_eos=True) as lines:
        next(lines)
        page.locator("tr[data-request]").wait_for()
    page.get_by_text("No such request.").wait_for()


def test_view_is_changed_by_the_place_of_a_key(deployment, page):
    """On a Mac, Alt gives the key 2 another character."""
    frontend = deployment.frontend()
    eventually(frontend.is_live, what="the frontend")
    show(page, frontend.url, "chat")
    pressed = "{key: '™', code: 'Digit2', altKey: true}"
    page.evaluate(f"dispatchEvent(new KeyboardEvent('keydown', {pressed}))")

    page.locator("main.view-topology h1").wait_for()


def test_model_that_comes_later_can_be_chosen_in_the_chat(deployment, served, page):
    show(page, served.url, "chat")
    page.locator("option", has_text=MODEL).wait_for(state="attached")
    served.others.append(deployment.mocker("--model-name", "later"))

    page.locator("option", has_text="later").wait_for(state="attached")


def test_planners_of_two_namespaces_are_shown_each_with_its_simulation(deployment, page):
    frontend = deployment.frontend()
    decision = {"time": 1.0, "outcome": "hold", "is_leader": True, "reason": "nothing to change",
                "present": {"prefill": 0, "decode": 1}, "replicas": {"prefill": 0, "decode": 1}}  # fmt: skip
    reports = [
        {"namespace": name, "policy": "load", "mode": "agg", "interval_s": 10.0,
         "decisions": [{**decision, "is_leader": is_leader}],
         "what_if": [{**decision, "reason": f"future of {name}"}]}
        for name, is_leader in (("one", True), ("two", True), ("two", False))
    ]  # fmt: skip
    page.route("**/console/api/planner*", lambda route: route.fulfill(json={"planners": reports}))
    eventually(frontend.is_live, what="the frontend")
    show(page, frontend.url, "planner")
    page.locator("[data-planner]").nth(1).wait_for()
    names = [each.get_attribute("data-planner") for each in page.locator("[data-planner]").all()]
    two = page.locator('[data-planner="two"]')
    two.get_by_role("button", name="Simulate").click()
    two.get_by_text("future of two").wait_for()

    assert names == ["one", "two"]
    assert page.get_by_text("1 more stand by").count() == 1
    assert page.get_by_text("future of one").count() == 0


def test_answer_is_stopped_and_copied_as_commands_that_run(served, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("Most tokens").fill("1500")
    page.fill("#question", "Go on for ever")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .text").nth(2).filter(has_text=re.compile(r"\w\w")).wait_for()
    page.locator("#question").press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    eventually(lambda: get(served, "requests")["num_open"] == 0, what="the end of the request")

    assert 0 < get(served, "requests")["rows"][0]["output_tokens"] < 1500
    assert page.locator("#question").evaluate("each => each === document.activeElement")
    page.get_by_label("Most tokens").fill("8")
    for kind, start in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        page.get_by_role("button", name=f"Copy as {kind}").click()
        page.get_by_text(f"{kind} copied").wait_for()
        code = page.evaluate("navigator.clipboard.readText()")
        environ = {**os.environ, "DYN_API_KEY": "unused"}
        done = subprocess.run(
            [*start, code], capture_output=True, text=True, env=environ, timeout=PATIENT_S
        )
        assert done.returncode == 0, done.stderr
        assert 'Go on for ever"}],' in code.replace("\\", "")  # the last question, not its answer
        assert ("data: {" in done.stdout) is (kind == "curl")
        assert done.stdout.strip()


def test_conversation_and_its_running_answer_outlive_another_view(served, page):
    page.get_by_label("Most tokens").fill("60")
    page.fill("#question", "Go on")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .text").nth(2).filter(has_text=re.compile(r"\w\w")).wait_for()
    page.locator(".figures a").first.click()
    page.locator("[data-candidate]").first.wait_for()
    assert get(served, "requests")["num_open"] == 1
    page.get_by_role("link", name="Chat").click()
    page.locator(".turn.assistant .figures").nth(2).get_by_text("60 tokens").wait_for()

    asked = [each.inner_text() for each in page.locator(".turn.user .text").all()]
    assert asked == [QUESTION, "And then?", "Go on"]
    assert page.get_by_label("Most tokens").input_value() == "60"


def test_question_that_failed_is_not_asked_again_with_the_next_one(served, page):
    bodies = []
    page.on("request", lambda each: each.method == "POST" and bodies.append(each.post_data_json))
    page.get_by_label("Temperature").fill("9")
    page.fill("#question", "Too hot")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("temperature").wait_for()
    page.get_by_label("Temperature").fill("")
    ask(page, "And the end?")

    assert "400 (Bad Request)" in page.problems.pop()  # Chromium reports the refusal as well
    asked = [each["content"] for each in bodies[-1]["messages"] if each["role"] == "user"]
    assert asked == [QUESTION, "And then?", "And the end?"]


def test_reasoning_is_folded_and_calls_of_tools_are_shown(deployment, page, tmp_path):
    model = tmp_path / "echo"
    shutil.copytree(f"{native.__path__[0]}/storyteller", model)
    (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    frontend = deployment.frontend()
    frontend.others = [
        deployment.mocker(
            "--model", str(model), "--model-name", "echo", "--echo",
            "--dyn-reasoning-parser", "qwen3", "--dyn-tool-call-parser", "hermes",
        )
    ]  # fmt: skip
    frontend.await_models(["echo"])
    show(page, frontend.url, "chat")
    page.get_by_text("Parameters").click()
    page.get_by_label("Tools (JSON)").fill(TOOLS)
    page.fill("#question", ANSWER)
    page.keyboard.press("Enter")
    answer = page.locator(".turn.assistant")
    answer.locator(".figures").get_by_text("prompt tokens cached").wait_for()

    assert answer.locator("p.text").last.inner_text() == "Then"
    assert answer.locator("details p").is_hidden()
    answer.get_by_text("Reasoning", exact=True).click()
    assert answer.locator("details p").inner_text() == "first the river"
    assert answer.locator("pre").inner_text() == 'look({"at": "the river"})'
    page.get_by_label("Tools (JSON)").fill("{")
    page.fill("#question", "hi")
    page.keyboard.press("Enter")
    page.get_by_text("Tools: expected a JSON list").wait_for()
    page.get_by_role("button", name="Copy as curl").click()  # which says the same
    page.evaluate("location.hash = '#/requests/%'")  # typed by hand, and no encoded id
    page.get_by_role("link", name="All requests").wait_for()
    (problem,) = page.problems
    assert problem.endswith("404 (Not Found)")
    page.problems.clear()
