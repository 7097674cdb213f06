"""A page of another origin in a real browser cannot drive a local server, unless its origin is allowed."""

import contextlib
import http.server
import json
import queue
import shutil
import subprocess
import threading

import httpx
import pytest
from deployment import MODEL

from waiting import PATIENT_S, eventually

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
THRESHOLD = {"model": MODEL, "active_decode_blocks_threshold": 0}
# What the page tries: path, body, content type, mode. A blob has no type; `no-cors` needs no permission to send,
# only to read.
ATTACK = [
    ["/v1/chat/completions", CHAT, "", "no-cors"],
    ["/clear_kv_blocks", {}, "", "no-cors"],
    ["/busy_threshold", THRESHOLD, "", "no-cors"],
    ["/v1/chat/completions", CHAT, "application/json", "cors"],
]
REQUESTS = "dynamo_frontend_requests_total{"
PAGE = """<!doctype html><script>
async function attempt([path, body, type, mode]) {
  try {
    const answer = await fetch(SERVER + path,
      {method: "POST", mode, headers: type ? {"content-type": type} : {},
       body: type ? JSON.stringify(body) : new Blob([JSON.stringify(body)])});
    return mode + " " + answer.status;
  } catch (error) { return mode + " failed"; }
}
async function run() {
  const results = [];
  for (const one of ATTACK) results.push(await attempt(one));
  await fetch("/results", {method: "POST", body: JSON.stringify(results)});
}
run();
</script>"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: as root on Debian, tests/install_services.sh"
)


class Site(http.server.ThreadingHTTPServer):
    """A foreign site with one page, which reports what it achieved."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Page)
        self.page = ""
        self.results = queue.Queue()
        self.origin = f"http://127.0.0.1:{self.server_port}"


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(self.server.page.encode())

    def do_POST(self):
        length = int(self.headers["content-length"])
        self.server.results.put(json.loads(self.rfile.read(length)))
        self.reply(b"")

    def reply(self, body):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Stay quiet."""


@pytest.fixture
def site():
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def visit(site, server_url, profile):
    """Open the page in Chromium and return what its attempts gave."""
    site.page = PAGE.replace("SERVER", json.dumps(server_url)).replace("ATTACK", json.dumps(ATTACK))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", site.origin + "/"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return site.results.get(timeout=PATIENT_S)
    finally:
        browser.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            browser.wait(PATIENT_S)
        browser.kill()
        browser.wait()


def test_foreign_page_achieves_nothing(deployment, site, tmp_path):
    frontend = deployment.frontend()
    deployment.mocker()
    frontend.await_models([MODEL])
    server_url = frontend.url.replace("127.0.0.1", "localhost")
    results = visit(site, server_url, tmp_path / "profile")

    # The browser hides the status of what it lets a foreign page send.
    assert results == ["no-cors 0", "no-cors 0", "no-cors 0", "cors failed"]
    text = httpx.get(f"{server_url}/metrics", timeout=PATIENT_S).text
    assert not [line for line in text.splitlines() if line.startswith(REQUESTS)]
    thresholds = httpx.get(f"{server_url}/busy_threshold", timeout=PATIENT_S).json()["thresholds"]
    assert all(one["active_decode_blocks_threshold"] != 0 for one in thresholds)


def test_page_of_an_allowed_origin_chats(deployment, site, tmp_path):
    frontend = deployment.frontend("--cors-allow-origin", site.origin)
    deployment.mocker()
    frontend.await_models([MODEL])
    results = visit(site, frontend.url.replace("127.0.0.1", "localhost"), tmp_path / "profile")

    assert results[-1] == "cors 200"


def test_page_that_has_its_name_mean_our_address_reads_nothing(deployment, tmp_path):
    """By plain HTTP a browser sends neither `Origin` nor `Sec-Fetch-Site` with what a page reads under its own name."""
    frontend = deployment.frontend()
    frontend.await_models([])
    port = frontend.url.rpartition(":")[2]
    rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    command = [CHROMIUM, *FLAGS, rebound, f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    pages = []

    def has_come():
        """Return whether a page has come: on a busy machine Chromium may print what is there before, which is empty."""
        page = subprocess.run(
            [*command, f"http://evil.example:{port}/v1/files"],
            capture_output=True, check=True, text=True, timeout=PATIENT_S,
        ).stdout  # fmt: skip
        pages.append(page)
        return page

    eventually(has_come, what="a page")

    assert "--allowed-hosts" in pages[-1]
