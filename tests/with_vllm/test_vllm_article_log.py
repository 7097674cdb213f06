"""The log of the first article's prefill and decode workers, line by line, on real vLLM.

The article's commands are typed but for what a CPU and a model of random weights need; `--connector null`, which the
fourth article's chart has, is as if the flag was not given. The article's lines are patterns here, in its order, for
each process. What differs, and is allowed to:

- No line `Registering new TcpStream`: an answer comes over the connection that its request has taken.
- `is still in WAITING_FOR_REMOTE_KVS state` comes as often as vLLM's scheduler looks, once at least.

Names of modules are vLLM's and ours of today, its lines have more fields than in 2025, and other lines may stand
between those of the article.
"""

import importlib.util
import os
import re
import sys

import httpx
import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("vllm and nixl are not installed here: make test-vllm", allow_module_level=True)

from deployment import Frontend, Process

import ports
import vllm_models
from vllm_engine import ENVIRONMENT
from waiting import PATIENT_S, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
MODEL = "Qwen/Qwen3-0.6B"
CPU_FLAGS = (
    "--enforce-eager --dtype float32 --block-size 32 --num-gpu-blocks-override 24 --max-model-len 512"
    " --connector null"
)
START_S = 1500.0  # on a busy machine; usually half a minute
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (DEBUG| INFO|WARNING|ERROR) [\w.]+: .*")
CONTINUED = "    "  # a message of several lines
ENGINE = "[0-9a-f]{32}"
REMOTE = (
    rf"'remote_block_ids': \[\[1\]\], 'remote_engine_id': '{ENGINE}'"
    r".*'remote_host': '127.0.0.1', 'remote_port': \d+, 'tp_size': 1"
)
IMPORT = rf"{{'do_remote_prefill': True, 'do_remote_decode': False, {REMOTE}"
IMPORTED = rf"{{'do_remote_prefill': False, 'do_remote_decode': False, {REMOTE}"
EXPORT = "kv_transfer_params={'do_remote_decode': True}"
DECODE = (  # line 233 of the article and on
    r"DEBUG \S+: Current Prefill Workers: 1$",
    r"DEBUG \S+: Current Prefill Workers: 1$",
    r'DEBUG \S+: starting task to process python async generator stream request_id="<id>"',
    r"DEBUG \S+: New Request ID: <id>",
    r"DEBUG \S+: EngineCore loop active\.",
    rf"DEBUG \S+: NIXLConnector get_num_new_matched_tokens: num_computed_tokens=0, kv_transfer_params={IMPORT}",
    rf"DEBUG \S+: NIXLConnector update_state_after_alloc: num_external_tokens=<num>, kv_transfer_params={IMPORT}",
    rf"DEBUG \S+: start_load_kv for request \S*<id>\S* from remote engine {ENGINE}\."
    r" Num local_block_ids: 1\. Num remote_block_ids: 1\.",
    r"DEBUG \S+: Querying metadata on path: tcp://127\.0\.0\.1:\d+ at remote .*rank 0",
    r"DEBUG \S+: NIXL handshake: get metadata took: \d\S*",
    rf"DEBUG \S+: Created \d+ blocks for dst engine {ENGINE} with remote rank 0 and local rank 0",
    r"DEBUG \S+: NIXL handshake: add agent took: \d\S*",
    rf"DEBUG \S+: Remote agent {ENGINE} available, calling _read_blocks .*for req \S*<id>",
    r"DEBUG \S+: Rank 0, get_finished: 0 requests done sending and 1 requests done recving",
    r"DEBUG \S+: Finished recving KV transfer for request \S*<id>",
    rf"DEBUG \S+: NIXLConnector update_state_after_alloc: num_external_tokens=0, kv_transfer_params={IMPORTED}",
    rf"DEBUG \S+: NIXLConnector request_finished.*, request_status=FINISHED_\w+, kv_transfer_params={IMPORTED}",
    r"DEBUG \S+: EngineCore waiting for work\.",
)
WAITING = r"DEBUG \S+: \S*<id>\S* is still in WAITING_FOR_REMOTE_KVS state\."
FINISHED = (
    r'DEBUG \S+: finished processing python async generator stream request_id="<id>"'  # line 263
)
PREFILL = (  # line 269 of the article and on
    r'DEBUG \S+: starting task to process python async generator stream request_id="<id>"',
    r"DEBUG \S+: New Prefill Request ID: <id>",
    r"DEBUG \S+: EngineCore loop active\.",
    rf"DEBUG \S+: NIXLConnector get_num_new_matched_tokens: num_computed_tokens=0, {EXPORT}",
    rf"DEBUG \S+: NIXLConnector update_state_after_alloc: num_external_tokens=0, {EXPORT}",
    rf"DEBUG \S+: NIXLConnector request_finished.*, request_status=FINISHED_LENGTH_CAPPED, {EXPORT}",
    rf"DEBUG \S+: kv transfer params: {IMPORT}",
    FINISHED,
)
STATISTICS = (
    r" INFO \S+: Avg prompt throughput: [1-9]\S* tokens/s, .* Running: \d+ reqs",
    r" INFO \S+: Prefix cache hit rate: GPU: 0\.00%, CPU: 0\.00%",
)


class Article:
    """The article's processes: a worker and a prefill worker of one model, and the frontends of two articles."""

    def __init__(self, directory):
        self.directory = directory
        model = directory / MODEL
        model.mkdir(parents=True)
        vllm_models.make(model)
        environ = os.environ | ENVIRONMENT
        environ |= {"DYN_FILE_KV": str(directory / "discovery"), "DYN_LOG": "debug"}
        flags = ("--model", str(model), "--served-model-name", MODEL, *CPU_FLAGS.split())
        self.frontend = Frontend(ports.reserve(), environ, directory / "frontend.log")
        chart = ("--router-mode", "kv")
        self.kv_frontend = Frontend(ports.reserve(), environ, directory / "kv.log", *chart)
        self.frontend.others = [
            self._worker(environ, "decode", *flags),
            self._worker(environ, "prefill", *flags, "--is-prefill-worker"),
        ]
        self.processes: list[Process] = [
            self.frontend,
            self.kv_frontend,
            *self.frontend.others,
        ]

    def _worker(self, environ, name, *flags):
        """Start a worker whose standard output is apart from its log."""
        split = ("sh", "-c", 'exec "$@" 2>"$0"', str(self.directory / f"{name}.log"))
        argv = [*split, sys.executable, "-m", "dynamo.vllm", *flags]
        return Process(argv, environ, self.directory / f"{name}.out")

    def ask(self, frontend, text, **fields):
        """Ask as the article does; return the id of the request and the number of its prompt tokens."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        url = f"{frontend.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return said["id"].removeprefix("chatcmpl-"), said["usage"]["prompt_tokens"]

    def lines(self, name):
        """Return the lines of a process on standard error (`.log`) or standard output (`.out`)."""
        return (self.directory / name).read_text().splitlines()


def follow(lines, patterns, request_id="", num_tokens=0):
    """Return the patterns that the lines lack in this order; `<id>` and `<num>` in them are those of a request."""
    values = {"<id>": request_id, "<num>": str(num_tokens)}
    left = [re.sub("<id>|<num>", lambda m: values[m[0]], pattern) for pattern in patterns]
    for line in lines:
        if left and re.search(left[0], line):
            del left[0]
    return left


@pytest.fixture(scope="module")
def article(tmp_path_factory):
    article = Article(tmp_path_factory.mktemp("article"))
    try:
        article.frontend.await_models([MODEL], within_s=START_S)
        eventually(
            lambda: (
                sum("Current Prefill Workers: 1" in line for line in article.lines("decode.log"))
                > 1
                and any("prefill workers of" in line for line in article.lines("kv.log"))
            ),
            within_s=START_S,
            what="the prefill worker is known",
        )
        yield article
    finally:
        for process in reversed(article.processes):
            process.end()


def test_prefill_and_decode_workers_log_the_lines_of_the_article_in_its_order(article):
    request_id, num_tokens = article.ask(
        article.frontend, "Hello, how are you? ", stream=False, max_tokens=20
    )
    asked = request_id, num_tokens

    def what_is_missing():
        decode, prefill = article.lines("decode.log"), article.lines("prefill.log")
        return {
            "decode": follow(decode, DECODE, *asked),
            "decode, waiting": follow(decode, (*DECODE[:8], WAITING, *DECODE[13:]), *asked),
            "decode, end": follow(decode, (*DECODE[:-1], FINISHED, DECODE[0]), *asked),
            "prefill": follow(prefill, PREFILL, *asked),
            "prefill, engine": follow(prefill, (*PREFILL[:6], DECODE[-1]), *asked),
            "decode, statistics": follow(decode, STATISTICS),
            "prefill, statistics": follow(prefill, STATISTICS),
        }

    eventually(
        lambda: not any(what_is_missing().values()),
        what=f"the article's lines: {what_is_missing()}",
    )


def test_all_processes_of_vllm_log_in_one_form_and_nothing_on_standard_output(article):
    for name in ("decode.log", "prefill.log"):
        lines = article.lines(name)
        odd = [line for line in lines if not LINE.match(line) and not line.startswith(CONTINUED)]

        assert odd == []
        assert article.lines(name.replace(".log", ".out")) == []
        assert {"vllm", "dynamo"} <= {
            line.split()[2].partition(".")[0] for line in lines if LINE.match(line)
        }


def test_prefill_and_decode_of_the_fourth_articles_chart_disaggregate(article):
    request_id, num_tokens = article.ask(article.kv_frontend, "Tell me a story", max_tokens=5)
    metrics = httpx.get(f"{article.kv_frontend.url}/metrics", timeout=PATIENT_S).text
    (row,) = (r for r in metrics.splitlines() if "routed_prefills_total{" in r and "remote" in r)

    assert row.endswith(" 1.0"), row
    asked = request_id, num_tokens
    assert not follow(article.lines("prefill.log"), PREFILL[:-1], *asked)
    assert not follow(article.lines("decode.log"), DECODE[5:7], *asked)
