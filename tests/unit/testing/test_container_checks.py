"""The laptop's API server refuses containers as a real one does, in the words of its sources (1.36)."""

import pytest

from dynamo.testing.kube import builtin_rules, container_checks

VARIABLE = "a valid environment variable name must consist only of printable ASCII characters other than '='"
FROM = {"configMapRef": {"name": "c"}}
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
    assert findings(env=[{"name": name, "value": "x"}], envFrom=[{"prefix": name, **FROM}]) == []


@pytest.mark.parametrize(
    ("name", "shown"), [("KEY=1", '"KEY=1"'), ("a\tb", r'"a\tb"'), ("ä", '"ä"'), ("=", '"="')]
)
def test_variable_with_another_name_is_refused(name, shown):
    wrong = [{"name": "OK"}, {"name": name}]

    assert findings(env=wrong, envFrom=[{"prefix": name, **FROM}]) == [
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


GPU, MEMORY = "nvidia.com/gpu", "memory"


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (
            {"requests": {MEMORY: "2048Mi"}, "limits": {MEMORY: "1Gi"}},
            'requests: Invalid value: "2Gi": must be less than or equal to memory limit of 1Gi',
        ),
        (
            {"requests": {GPU: "1"}, "limits": {GPU: "2"}},
            'requests: Invalid value: "1": must be equal to nvidia.com/gpu limit of 2',
        ),
        (
            {"requests": {GPU: "1"}},
            "limits: Required value: Limit must be set for non overcommitable resources",
        ),
    ],
)
def test_request_that_its_limit_does_not_allow_is_refused(resources, expected):
    assert findings(resources=resources) == [f"spec.containers[0].resources.{expected}"]


def test_requests_within_their_limits_pass():
    amounts = {"cpu": "1", MEMORY: "1Gi", "ephemeral-storage": "1Gi"}
    limits = {"cpu": "1000m", MEMORY: "2Gi", GPU: "1"}

    assert findings(resources={"requests": {**amounts, GPU: 1}, "limits": limits}) == []


def test_names_of_containers_are_unique():
    assert findings(init={"name": "main"}) == [
        'spec.initContainers[0].name: Duplicate value: "main"'
    ]


def test_ports_have_numbers_and_short_names_of_their_own():
    ports = [
        {"name": "http", "containerPort": 8000},
        {"name": "http", "containerPort": 8001},
        {"name": "metrics-and-health"},
        {"containerPort": 70_000, "protocol": "HTTP"},
    ]

    assert findings(ports=ports) == [
        'spec.containers[0].ports[1].name: Duplicate value: "http"',
        'spec.containers[0].ports[2].name: Invalid value: "metrics-and-health": must be no more than 15 bytes',
        "spec.containers[0].ports[2].containerPort: Required value",
        "spec.containers[0].ports[3].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        'spec.containers[0].ports[3].protocol: Unsupported value: "HTTP": supported values: "SCTP", "TCP", "UDP"',
    ]


def test_variable_has_one_source():
    source = {"fieldRef": {"fieldPath": "metadata.name"}}

    assert findings(env=[{"name": "A", "value": "x", "valueFrom": source}]) == [
        'spec.containers[0].env[0].valueFrom: Invalid value: "": may not be specified when `value` is not empty'
    ]


def test_policy_of_pulls_is_one_of_three():
    assert findings(imagePullPolicy="IfAbsent") == [
        'spec.containers[0].imagePullPolicy: Unsupported value: "IfAbsent": supported values: "Always",'
        ' "IfNotPresent", "Never"'
    ]


def test_volumes_have_names_and_mounts_have_places_of_their_own():
    mounts = [{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/a"}, {"name": "a"}]
    container = {"name": "main", "image": "x:1", "volumeMounts": mounts}
    spec = {"containers": [container], "volumes": [{"name": "a"}, {"name": "a"}, {}]}

    assert [f"{each.field}: {each.message}" for each in container_checks.check(spec, "spec")] == [
        'spec.volumes[1].name: Duplicate value: "a"',
        "spec.volumes[2].name: Required value",
        'spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/a": must be unique',
        "spec.containers[0].volumeMounts[2].mountPath: Required value",
    ]


def test_paths_in_volumes_do_not_leave_them():
    items = [{"key": "a", "path": "b/../../c"}, {"key": "a", "path": "/etc/x"}, {"key": "a"}]
    mounts = [{"name": "a", "mountPath": "/a", "subPath": "../other"}]
    container = {"name": "main", "image": "x:1", "volumeMounts": mounts}
    volume = {"name": "a", "configMap": {"name": "c", "items": items}}
    spec = {"containers": [container], "volumes": [volume]}
    place = "spec.volumes[0].configMap.items"

    assert [f"{each.field}: {each.message}" for each in container_checks.check(spec, "spec")] == [
        f"{place}[0].path: Invalid value: \"b/../../c\": must not contain '..'",
        f'{place}[1].path: Invalid value: "/etc/x": must be a relative path',
        f"{place}[2].path: Required value",
        "spec.containers[0].volumeMounts.subPath: Invalid value: \"../other\": must not contain '..'",
    ]


def field_of(path):
    return [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}]


@pytest.mark.parametrize("path", ["status.hostIPs", "metadata.labels['a']", "spec.nodeName"])
def test_field_of_the_pod_may_be_a_variable(path):
    assert findings(env=field_of(path)) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "Required value"),
        ("a.b", 'Invalid value: "a.b": error converting fieldPath: field label not supported: a.b'),
        (
            "a['b']",
            """Invalid value: "a['b']": error converting fieldPath: field label does not support subscript: a['b']""",
        ),
        (
            "status.phase",
            'Unsupported value: "status.phase": supported values: "metadata.name", "metadata.namespace",'
            ' "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs",'
            ' "status.podIP", "status.podIPs"',
        ),
    ],
)
def test_field_that_is_no_variable_is_refused(path, message):
    field = "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath"

    assert findings(env=field_of(path)) == [f"{field}: {message}"]


@pytest.mark.parametrize("is_projected", [False, True])
def test_wrong_items_of_a_volume_of_fields_are_refused(is_projected):
    items = [
        {"path": "../a", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "b", "fieldRef": {"fieldPath": "status.podIP"}},
        {"path": "c"},
    ]
    place, volume = "spec.volumes[0].downwardAPI", {"downwardAPI": {"items": items}}
    if is_projected:
        place = "spec.volumes[0].projected.sources[0].downwardAPI"
        volume = {"projected": {"sources": [volume]}}
    spec = {"containers": [{"name": "main", "image": "x:1"}], "volumes": [{"name": "v", **volume}]}

    assert [f"{each.field}: {each.message}" for each in container_checks.check(spec, "spec")] == [
        f"{place}.path: Invalid value: \"../a\": must not contain '..'",
        f'{place}.fieldRef.fieldPath: Unsupported value: "status.podIP": supported values: "metadata.annotations",'
        ' "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"',
        f"{place}: Required value: one of fieldRef and resourceFieldRef is required",
    ]


def test_hook_has_one_handler():
    hooks = {"postStart": {}, "preStop": {"sleep": {"seconds": 5}}}

    assert findings(lifecycle=hooks) == [
        "spec.containers[0].lifecycle.postStart: Required value: must specify a handler type"
    ]


SUBDOMAIN = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters"
ONE_OF = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, [f'valueFrom: Invalid value: "": {ONE_OF}']),
        ({"secretKeyRef": {"name": "s"}}, ["valueFrom.secretKeyRef.key: Required value"]),
        ({"resourceFieldRef": {}}, ["valueFrom.resourceFieldRef.resource: Required value"]),
        (
            {"secretKeyRef": {"name": "s", "key": "k"}, "configMapKeyRef": {"name": "c", "key": "k"}},
            ['valueFrom: Invalid value: "": may not have more than one field specified at a time'],
        ),
    ],
)  # fmt: skip
def test_value_from_elsewhere_comes_from_one_whole_source(source, expected):
    field = "spec.containers[0].env[0]"

    assert findings(env=[{"name": "A", "valueFrom": source}]) == [f"{field}.{x}" for x in expected]


def test_reference_of_a_variable_names_an_object():
    (mistake,) = findings(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"key": "k"}}}])

    assert mistake.startswith(
        f'spec.containers[0].env[0].valueFrom.configMapKeyRef.name: Invalid value: "": {SUBDOMAIN}'
    )


def test_source_of_variables_names_an_object():
    assert findings(envFrom=[{"secretRef": {}}, {"prefix": "A"}]) == [
        "spec.containers[0].envFrom[0].secretRef.name: Required value",
        'spec.containers[0].envFrom: Invalid value: "": must specify one of: `configMapRef` or `secretRef`',
    ]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("configMap", "name"),
        ("hostPath", "path"),
        ("persistentVolumeClaim", "claimName"),
        ("secret", "secretName"),
    ],
)
def test_volume_names_what_it_is_made_of(kind, field):
    spec = {"containers": [{"name": "main", "image": "x:1"}], "volumes": [{"name": "v", kind: {}}]}

    assert [f"{each.field}: {each.message}" for each in container_checks.check(spec, "spec")] == [
        f"spec.volumes[0].{kind}.{field}: Required value"
    ]
