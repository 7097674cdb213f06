"""A real Chromium on the console's pages, for tests: the fixtures `browser` and `page` are in `conftest`."""

import importlib.util
import pathlib
import shutil

import httpx
import pytest

from waiting import PATIENT_S

CHROMIUM = shutil.which("chromium")
PLAYWRIGHT = importlib.util.find_spec("playwright")
AXE = importlib.util.find_spec("axe_core_python")
QUESTION = (
    "Tell me a story about a brave cat that crossed the river and met an old and friendly bear"
)
# The sum of layout shifts in the worst window of at most 5 s without a pause of 1 s, as browsers report it.
SHIFTS = """() => { window.shift = 0; let sum = 0, first = 0, last = 0; new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) {
    if (entry.startTime - last > 1000 || entry.startTime - first > 5000) { sum = 0; first = entry.startTime; }
    last = entry.startTime; sum += entry.value; window.shift = Math.max(window.shift, sum);
  }
}).observe({type: "layout-shift", buffered: true}); }"""

NEEDS_BROWSER = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: as root on Debian, tests/install_services.sh"
    ),
    pytest.mark.skipif(PLAYWRIGHT is None, reason="needs playwright: make setup"),
]


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
    page.locator(".ask button[type=submit]:enabled").wait_for()  # once the page knows the models
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
