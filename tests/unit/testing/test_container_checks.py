"""The laptop's API server refuses containers as a real one does, in the words of its sources (1.36)."""

import pytest

from dynamo.testing.kube import builtin_rules, container_checks

VARIABLE = "a valid environment variable name must consist only of printable ASCII characters other than '='"
PLAIN_INIT = "Forbidden: may not be set for init containers without restartPolicy=Always"
HTTP = {"httpGet": {"port": 80}}


def findings(*, init=None, **fields):
    """Return the mistakes of a pod with one container that has these fields, or an init container with those."""
    container = {"name": "main", "image": "x:1"}
    spec = {"containers": [{**container, **fields}]}
    if init is not None:
        spec["initContainers"] = [{**container, "name": "first", **init}]
    builtin_rules.fill_pod_spec(spec)
    return [f"{each.field}: {each.message}" for each in container_checks.check(spec, "spec")]


@pytest.mark.parametrize("name", ["A", "a.b-c_1", "1", "with space", "$", "~"])
def test_variable_may_have_any_printable_name(name):
    assert findings(env=[{"name": name, "value": "x"}], envFrom=[{"prefix": name}]) == []


@pytest.mark.parametrize(
    ("name", "shown"), [("KEY=1", '"KEY=1"'), ("a\tb", r'"a\tb"'), ("ä", '"ä"'), ("=", '"="')]
)
def test_variable_with_another_name_is_refused(name, shown):
    wrong = [{"name": "OK"}, {"name": name}]

    assert findings(env=wrong, envFrom=[{"prefix": name}]) == [
        f"spec.containers[0].env[1].name: Invalid value: {shown}: {VARIABLE}",
        f"spec.containers[0].envFrom[0].prefix: Invalid value: {shown}: {VARIABLE}",
    ]


def test_variable_without_a_name_is_refused():
    assert findings(env=[{"value": "x"}]) == ["spec.containers[0].env[0].name: Required value"]


@pytest.mark.parametrize(
    "probe",
    [
        HTTP,
        {"httpGet": {"port": "http-1", "scheme": "HTTPS", "httpHeaders": [{"name": "X-A"}]}},
        {"exec": {"command": ["true"]}},
        {"tcpSocket": {"port": 65_535}},
        {"grpc": {"port": 1}},
        # what is 0 or empty counts as not there
        {"httpGet": {"port": 80, "path": "", "scheme": ""}, "successThreshold": 0},
        {**HTTP, "timeoutSeconds": 0, "periodSeconds": 0, "failureThreshold": 0},
    ],
)
@pytest.mark.parametrize("kind", builtin_rules.PROBES)
def test_probe_passes(kind, probe):
    assert findings(**{kind: probe}) == []


@pytest.mark.parametrize(
    ("probe", "mistakes"),
    [
        ({}, [": Required value: must specify a handler type"]),
        ({"periodSeconds": 5}, [": Required value: must specify a handler type"]),
        (
            {"exec": {"command": ["true"]}, "tcpSocket": {"port": 1}, "grpc": {"port": 1}},
            [
                ".tcpSocket: Forbidden: may not specify more than 1 handler type",
                ".grpc: Forbidden: may not specify more than 1 handler type",
            ],
        ),
        ({"exec": {}}, [".exec.command: Required value"]),
        (
            {"httpGet": {"port": 70_000}},
            [".httpGet.port: Invalid value: 70000: must be between 1 and 65535, inclusive"],
        ),
        (
            {"tcpSocket": {}},
            [".tcpSocket.port: Invalid value: 0: must be between 1 and 65535, inclusive"],
        ),
        (
            {"httpGet": {"port": "8080"}},
            ['.httpGet.port: Invalid value: "8080": must contain at least one letter (a-z)'],
        ),
        (
            {"httpGet": {"port": "a-name-that-is-long"}},
            ['.httpGet.port: Invalid value: "a-name-that-is-long": must be no more than 15 bytes'],
        ),
        (
            {"httpGet": {"port": "-A--b"}},
            [
                '.httpGet.port: Invalid value: "-A--b": must contain only alpha-numeric characters (a-z, 0-9), and'
                " hyphens (-)",
                '.httpGet.port: Invalid value: "-A--b": must not contain consecutive hyphens',
                '.httpGet.port: Invalid value: "-A--b": must not begin or end with a hyphen',
            ],
        ),
        (
            {"httpGet": {"port": 80, "scheme": "FTP"}},
            ['.httpGet.scheme: Unsupported value: "FTP": supported values: "HTTP", "HTTPS"'],
        ),
        (
            {"httpGet": {"port": 80, "httpHeaders": [{"name": "X A"}]}},
            [
                '.httpGet.httpHeaders: Invalid value: "X A": a valid HTTP header must consist of alphanumeric'
                " characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')"
            ],
        ),
        (
            {**HTTP, "initialDelaySeconds": -1, "failureThreshold": -2},
            [
                ".initialDelaySeconds: Invalid value: -1: must be greater than or equal to 0",
                ".failureThreshold: Invalid value: -2: must be greater than or equal to 0",
            ],
        ),
    ],
)
@pytest.mark.parametrize("kind", builtin_rules.PROBES)
def test_probe_is_refused(kind, probe, mistakes):
    assert findings(**{kind: probe}) == [f"spec.containers[0].{kind}{each}" for each in mistakes]


def test_number_of_successes_is_that_of_a_readiness_probe_only():
    twice = {**HTTP, "successThreshold": 2}

    assert findings(livenessProbe=twice, readinessProbe=twice, startupProbe=twice) == [
        "spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1",
        "spec.containers[0].startupProbe.successThreshold: Invalid value: 2: must be 1",
    ]


def test_grace_period_is_that_of_probes_that_end_a_container():
    patient, wrong = ({**HTTP, "terminationGracePeriodSeconds": seconds} for seconds in (60, 0))

    assert findings(livenessProbe=patient, readinessProbe=patient, startupProbe=wrong) == [
        "spec.containers[0].readinessProbe.terminationGracePeriodSeconds: Invalid value: 60: must not be set for"
        " readinessProbes",
        "spec.containers[0].startupProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0",
    ]


def test_init_container_has_probes_if_it_goes_on():
    probes = dict.fromkeys(builtin_rules.PROBES, HTTP)

    assert findings(init={"restartPolicy": "Always", **probes}) == []
    assert findings(init=probes) == [
        f"spec.initContainers[0].{kind}: {PLAIN_INIT}" for kind in builtin_rules.PROBES
    ]
