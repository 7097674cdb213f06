"""The fixtures of the stories; every test here starts real processes."""

import pytest
from console_browser import CHROMIUM
from deployment import Deployment

from waiting import PATIENT_S


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/system" in item.path.as_posix():
            item.add_marker(pytest.mark.system)


@pytest.fixture
def deployment(tmp_path):
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.end()


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
