"""Every expression of dashboards and alerts, asked of a real Prometheus that reads real processes.

Frontend, workers of both kinds with cache tiers, planner and operator run and are made to fail, so that no expression
is without data. It takes a minute: `make test-dashboards`.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml
from deployment import MODEL, Process, newly_asked
from split import Split

import members
import ports
from dynamo.planner import profile_files
from kube_cluster import running_cluster
from planner_cases import make_steady_profile
from waiting import PATIENT_S, eventually

METRICS = pathlib.Path(__file__).parents[2] / "deploy" / "metrics"
PROMPT = " ".join(f"Tell me the story of the cat number {i}." for i in range(40))
SIMULATED = "simulated"

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("DYN_TEST_PROMETHEUS") != "1", reason="takes a minute: make test-dashboards"
    ),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs Prometheus: as root on Debian, tests/install_services.sh",
    ),
]


def expressions():
    """Each expression by its place; those of alerts without the comparison, which is false as long as all is well."""
    alerts = yaml.safe_load((METRICS / "alerts.yml").read_text())["groups"][0]["rules"]
    found = {
        f"alert {rule['alert']}": re.sub(r" (==|>|<) [\d.]+$", "", rule["expr"]) for rule in alerts
    }
    for board in (METRICS / "grafana_dashboards").glob("*.json"):
        if board.stem == "dcgm":  # needs a GPU and NVIDIA's exporter
            continue
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                place = f"{board.stem}, {panel['title']}, {target['refId']}"
                found[place] = target["expr"].replace("$__rate_interval", "2m")
    return {place: text.replace("[5m]", "[2m]") for place, text in found.items()}


@contextlib.contextmanager
def prometheus(folder, targets):
    """Run Prometheus with our alerts over these processes by job; yield its address."""
    port = ports.reserve()
    shutil.copy(METRICS / "alerts.yml", folder)
    configuration = yaml.safe_load((METRICS / "prometheus.yml").read_text())
    configuration["global"].update(scrape_interval="1s", evaluation_interval="1s")
    configuration["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": addresses}]}
        for job, addresses in targets.items()
    ]
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    argv = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    process = Process(argv, dict(os.environ), folder / "prometheus.log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.end()


def ask(url, path, **query):
    try:
        answer = httpx.get(f"{url}/api/v1/{path}", params=query, timeout=PATIENT_S)
        return answer.json()["data"]
    except httpx.TransportError:
        return None


def unread(url):
    """Return the addresses that Prometheus has not read yet."""
    targets = (ask(url, "targets") or {}).get("activeTargets", [{"health": "", "scrapeUrl": url}])
    return [target["scrapeUrl"] for target in targets if target["health"] != "up"]


def operate(environ, log, port):
    flags = ("--etcdAddr=etcd:2379", "--health-probe-bind-address=0")
    argv = (
        sys.executable,
        "-m",
        "dynamo.operator",
        *flags,
        f"--metrics-bind-address=127.0.0.1:{port}",
    )
    return Process([*argv], environ, log)


def use_and_break(frontend, prefill, mockers):
    """Ask in all ways that the expressions count: cached, refused, given up by the client, moved, and left alone."""
    answered = [frontend.chat(f"{PROMPT} {n}", max_tokens=8) for n in range(3)]
    frontend.chat(PROMPT, max_tokens=8)
    frontend.chat("too long", max_tokens=10**6)
    with frontend.stream(max_tokens=400) as lines:
        next(lines)  # and the client goes away
    with (
        newly_asked(mockers) as asked,
        frontend.stream(model=SIMULATED, max_tokens=200, ignore_eos=True) as lines,
    ):
        next(lines)
        asked().kill()
        moved = list(lines)
    with frontend.stream(model=SIMULATED, max_tokens=200, ignore_eos=True) as lines:
        next(lines)
        next(one for one in mockers if one.is_running).kill()  # and no other one is left
        failed = list(lines)
    refused = frontend.chat("x", guided_regex="(?<=a)b")  # by the engine
    prefill.kill()
    frontend.chat(f"{PROMPT} alone", max_tokens=8)
    assert [each.status_code for each in answered] == [200] * 3
    assert moved[-1] == "[DONE]"
    assert any("error" in line for line in failed)
    assert refused.status_code == 400


def test_every_expression_has_data(deployment, tmp_path):
    members.make_certificates(tmp_path)
    deployment.environ |= {
        f"DYN_{name.upper()}": path for name, path in members.flags(tmp_path).items()
    }
    frontend = deployment.frontend(
        *("--router-mode", "kv", "--audit-sinks", "jsonl"),
        *("--audit-output-path", str(tmp_path / "audit")),
    )
    tiers = ("--connector", "kvbm", "--kvbm-storage-tiers", "hbm,host_dram,nvme_ssd",
             "--kvbm-cpu-cache-gb", "100MB", "--kvbm-disk-cache-gb", "200MB")  # fmt: skip
    split = Split(deployment, frontend=frontend)
    decode = split.decode(*tiers, "--kvbm-nvme-path", str(tmp_path / "cache"))
    prefill = split.prefill()
    mockers = [deployment.mocker("--model-name", SIMULATED, "--tick-ms", "50") for _ in range(2)]
    profile_files.write_profile(make_steady_profile(), tmp_path / "profile")
    planner_port, operator_port = ports.reserve(), ports.reserve()
    deployment.run(
        *("dynamo.planner", "--environment", "virtual", "--model-name", MODEL, "--mode", "disagg"),
        *("--policy", "predictive", "--profile-results-dir", str(tmp_path / "profile")),
        *("--frontend-url", frontend.url, "--planner-port", str(planner_port)),
        *("--adjustment-interval", "2"),
    )
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(tmp_path))
        crds = METRICS.parent / "crds"
        assert cluster.kubectl("apply", "-f", str(crds)).returncode == 0
        operator = operate(cluster.environ, tmp_path / "operator.log", operator_port)
        stack.callback(operator.end)
        graph = METRICS.parent / "examples" / "mocker.yaml"
        assert cluster.kubectl("apply", "-f", str(graph)).returncode == 0
        address = lambda url: url.removeprefix("http://")  # noqa: E731
        targets = {
            "dynamo-frontend": [address(frontend.url)],
            "dynamo-backend": [address(each.url) for each in (decode, prefill, *mockers)],
            "dynamo-planner": [f"127.0.0.1:{planner_port}"],
            "dynamo-operator": [f"127.0.0.1:{operator_port}"],
        }
        url = stack.enter_context(prometheus(tmp_path, targets))
        eventually(lambda: set(frontend.models()) == {MODEL, SIMULATED}, what="both models")
        eventually(lambda: unread(url) == [], what="all are read", every_s=0.5)

        use_and_break(frontend, prefill, mockers)
        waiting = dict(expressions())

        def have_data() -> bool:
            frontend.chat(f"{PROMPT} {len(waiting)}", max_tokens=4)
            for place, expression in list(waiting.items()):
                if ask(url, "query", query=expression)["result"]:
                    del waiting[place]
            return not waiting

        with contextlib.suppress(AssertionError):
            eventually(have_data, what="data", every_s=1)
        assert "\n".join(waiting) == ""
        rules = ask(url, "rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
    metrics_page = subprocess.run(
        ["promtool", "check", "metrics"],
        input=httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text,
        capture_output=True,
        text=True,
    )
    milliseconds = "_ms metric names should not contain abbreviated units"  # the original's names
    assert [m for m in metrics_page.stderr.splitlines() if not m.endswith(milliseconds)] == []
