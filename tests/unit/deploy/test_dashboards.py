"""Dashboards and alerts name only metrics and labels that our processes export, and each alert has its runbook."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml
from docs import generate

from dynamo.base import errors
from dynamo.frontend import metrics as frontend_metrics
from dynamo.observability import metrics
from dynamo.operator import objects, pod_template
from dynamo.operator.service import OperatorMetrics
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.policies import Targets
from dynamo.protocols import model_errors
from dynamo.worker import kv_tiers

ROOT = pathlib.Path(__file__).parents[3]
METRICS = ROOT / "deploy/metrics"
BOARDS = sorted((METRICS / "grafana_dashboards").glob("*.json"))
ALERTS = yaml.safe_load((METRICS / "alerts.yml").read_text())["groups"][0]["rules"]
NAME = re.compile(r"\b(?:dynamo|kvbm)_[a-z0-9_]+")
DCGM = "dcgm"  # its metrics are those of NVIDIA's exporter


def expressions():
    found = {rule["alert"]: [rule["expr"]] for rule in ALERTS}
    for board in BOARDS:
        if board.stem == DCGM:
            continue
        for panel in json.loads(board.read_text())["panels"]:
            key = f"{board.stem}: {panel['title']}"
            found[key] = [target["expr"] for target in panel["targets"]]
    return found


EXPRESSIONS = expressions()


@pytest.fixture(scope="module")
def exported():
    """The names of all samples of frontend, worker, planner and operator."""
    worker = metrics.Registry("dynamo_component")
    kv_tiers.KvTierMonitor(None, worker)
    planner = PlannerMetrics(Targets(ttft_s=1.0, itl_s=1.0), "m").registry
    names = set(NAME.findall(generate.reference()))
    for registry in (worker, planner, OperatorMetrics().registry):
        for family in registry.collectors.collect():
            suffix = "_total" if family.type == "counter" else ""
            names.add(family.name + suffix)
    return names


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_metric_is_one_that_a_process_exports(place, exported):
    for expression in EXPRESSIONS[place]:
        names = NAME.findall(expression)
        known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}

        assert names, expression
        assert {name for name in known if name not in exported} == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook(rule):
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.MULTILINE)

    assert anchor in {heading.lower() for heading in headings}
    assert rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("x"),
        errors.RateLimited("its key has used up its share"),
        errors.Cancelled("x"),
        model_errors.ModelNotFound("x"),
    ],
)
def test_errors_of_clients_are_no_reason_for_the_alert_on_failed_requests(error):
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "DynamoRequestsFail")
    excluded = re.search(r'error_type!~"([^"]+)"', rule["expr"])[1].split("|")

    assert frontend_metrics._error_type(error) in excluded
    assert frontend_metrics._error_type(errors.Overloaded("x")) not in excluded


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool: as root on Debian, tests/install_services.sh",
)


def run_rule(path, name, series, expected):
    """Have Prometheus compute an alert from series, a value each minute, and compare what fires with labels."""
    rule = next(rule for rule in ALERTS if rule["alert"] == name)
    expected_alerts = [
        {
            "exp_labels": {**labels, **rule["labels"]},
            "exp_annotations": {**rule["annotations"], "summary": summary},
        }
        for labels, summary in expected
    ]
    alerts = {"alertname": name, "eval_time": "8m", "exp_alerts": expected_alerts}
    tests = {
        "rule_files": [str(METRICS / "alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "alert_rule_test": [alerts],
            }
        ],
    }
    path.write_text(json.dumps(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_model_that_sleeps_on_purpose_is_no_reason_for_the_alert_on_models_without_workers(
    tmp_path,
):
    labels = '{instance="a:8000", job="f", model="%s"}'
    workers, wakeable = "dynamo_frontend_model_workers", "dynamo_frontend_model_wakeable"
    series = {
        workers + labels % "served": "2x9",
        workers + labels % "lost": "0x9",
        workers + labels % "asleep": "0x9",
        wakeable + labels % "asleep": "1x9",
        workers + labels % "fell asleep, then its start failed": "0x9",
        wakeable + labels % "fell asleep, then its start failed": "1 1 1 stale",
    }
    expected = [
        ({"instance": "a:8000", "job": "f", "model": model}, f"{model} has no worker")
        for model in ("fell asleep, then its start failed", "lost")
    ]

    run_rule(tmp_path / "tests.yml", "DynamoModelWithoutWorkers", series, expected)


@needs_promtool
@pytest.mark.parametrize(
    "counter",
    [
        'dynamo_component_prefills_total{instance="w:8081", where="fallback"}',
        'dynamo_frontend_routed_prefills_total{instance="f:8000", model="m", where="fallback"}',
    ],
    ids=["of decode workers", "of a frontend in router mode kv"],
)
def test_prefills_that_fall_back_are_a_reason_for_their_alert(counter, tmp_path):
    summary = "prompts are computed by decode workers, because remote prefill fails"

    run_rule(
        tmp_path / "tests.yml",
        "DynamoPrefillFallsBack",
        {counter: "0+60x9"},
        [({}, summary)],
    )


def test_dashboards_have_the_names_of_the_original():
    titles = {json.loads(board.read_text())["title"] for board in BOARDS}

    assert titles == {*("Dynamo", "KVBM", "Disagg", "Planner", "LLM worker", "Operator", "DCGM")}


@pytest.mark.parametrize("board", [b for b in BOARDS if b.stem != DCGM], ids=lambda b: b.stem)
def test_series_of_several_processes_have_names_of_their_own(board):
    """A process is told apart by its instance, unless an aggregation has put the processes together."""
    for panel in json.loads(board.read_text())["panels"]:
        for target in panel["targets"]:
            aggregation = re.match(
                r"(?:histogram_quantile\([\d.]+, )?(?:sum|max)(?: by \(([\w, ]+)\))?",
                target["expr"],
            )
            labels = (
                {"instance"} if aggregation is None else {*(aggregation[1] or "le").split(", ")}
            )
            names = {"le", *re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}

            assert labels <= names, target["expr"]


@needs_promtool
def test_planner_that_stands_by_is_not_shown_beside_the_one_that_acts(tmp_path):
    board = json.loads((METRICS / "grafana_dashboards/planner.json").read_text())
    expression = board["panels"][0]["targets"][1]["expr"]
    series = {
        f'dynamo_planner_{name}{{instance="{instance}", model_name="m"}}': f"{value}x9"
        for instance, is_leader in (("acts", 1), ("stands by", 0))
        for name, value in (("num_decode_replicas", 3), ("is_leader", is_leader))
    }
    labels = 'dynamo_planner_num_decode_replicas{instance="acts", model_name="m"}'
    shown = {"labels": labels, "value": 3}
    query = {"expr": expression, "eval_time": "5m", "exp_samples": [shown]}
    inputs = [{"series": k, "values": v} for k, v in series.items()]
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": [query]}]
    (tmp_path / "tests.yml").write_text(json.dumps({"tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("board", "families"),
    [("kvbm", r"kvbm_\w+_blocks_\w+"), ("disagg", r"dynamo_frontend_routed_prefill\w+")],
    ids=["copies of blocks between tiers", "prefills that frontends route"],
)
def test_dashboard_shows_all_families_of_its_kind(board, families):
    text = (METRICS / f"grafana_dashboards/{board}.json").read_text()
    exported_names = set(re.findall(rf"`({families})`", generate.reference()))

    assert exported_names
    assert {name for name in exported_names if name not in text} == set()


def test_panels_of_a_dashboard_do_not_overlap():
    for board in BOARDS:
        places = [
            (panel["gridPos"]["x"], panel["gridPos"]["y"])
            for panel in json.loads(board.read_text())["panels"]
        ]

        assert len(set(places)) == len(places)


def test_gpu_dashboard_names_metrics_of_the_exporter_and_says_that_it_is_unrun():
    board = json.loads((METRICS / "grafana_dashboards" / f"{DCGM}.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]

    assert all("DCGM_FI_DEV_" in expression for expression in expressions)
    assert "has not run" in board["description"]


@pytest.mark.parametrize("path", sorted((METRICS / "podmonitors").glob("*.yaml")))
def test_pod_monitor_names_a_port_and_labels_that_the_pods_have(path):
    monitor = yaml.safe_load(path.read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = monitor["spec"]["selector"]["matchLabels"]
    if path.stem == "operator":
        chart = (ROOT / "deploy/helm/dynamo-platform/templates/operator.yaml").read_text()
        assert f"name: {endpoint['port']}, containerPort" in chart
        assert "app.kubernetes.io/name: dynamo-operator" in chart
        assert labels == {"app.kubernetes.io/name": "dynamo-operator"}
    else:
        assert endpoint["port"] in {port["name"] for port in pod_template.make_ports(path.stem)}
        assert labels == {objects.TYPE_LABEL: path.stem, objects.METRICS_LABEL: "true"}


@needs_promtool
def test_prometheus_accepts_rules_and_expressions(tmp_path):
    queries = [
        {"record": f"test:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(e for group in EXPRESSIONS.values() for e in group)
    ]
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps({"groups": [{"name": "test", "rules": queries}]}))
    for path in (rules, METRICS / "alerts.yml"):
        done = subprocess.run(
            ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stderr
