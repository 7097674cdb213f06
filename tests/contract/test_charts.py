"""The Helm charts: rendered, linted, checked against Kubernetes's schemas, and held to least privilege."""

import functools
import itertools
import pathlib
import runpy

import pytest
import yaml

from dynamo.operator import identity, webhooks
from dynamo.operator.settings import OperatorConfig

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

packaging = runpy.run_path("deploy/helm/package.py")
VERSIONS = ("1.28", kubernetes_validate.latest_version())
CLUSTER_WIDE = {"dynamo-operator": {"namespaceRestriction": {"enabled": False}}}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    paths = packaging["package"]("0.4.1", tmp_path_factory.mktemp("charts"))
    return {path.name: path for path in paths}


def render(archive, values=None, *, name="dynamo-platform", namespace="dynamo-kubernetes"):
    chart = helm.Chart.load(archive)
    rendered = chart.render(values or {}, name=name, namespace=namespace)
    documents = itertools.chain(*(yaml.safe_load_all(text) for text in rendered.values()))
    return [document for document in documents if document]


def of_kind(objects, kind):
    return {obj["metadata"]["name"]: obj for obj in objects if obj["kind"] == kind}


def pod_specs(objects):
    for obj in objects:
        if obj["kind"] in ("Deployment", "StatefulSet"):
            yield obj["metadata"]["name"], obj["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def platform(archives):
    return archives["dynamo-platform-0.4.1.tgz"]


def test_packages_have_the_names_that_users_type(archives):
    assert sorted(archives) == [
        "dynamo-crds-0.4.1.tgz",
        "dynamo-platform-0.4.1.tgz",
        "dynamo-vllm-0.4.1.tgz",
    ]
    assert all(path.stat().st_size < 1 << 20 for path in archives.values())


@pytest.mark.parametrize("name", sorted(packaging["CHARTS"]))
def test_chart_passes_the_linter(name, tmp_path):
    found = helm.lint(packaging["complete"](name, tmp_path), strict=True)

    assert found["errors"] == []


def test_definitions_are_rendered_as_they_are(archives):
    rendered = render(archives["dynamo-crds-0.4.1.tgz"])
    written = [yaml.safe_load(p.read_text()) for p in pathlib.Path("deploy/crds").glob("*.yaml")]

    assert len(rendered) > 4
    assert of_kind(rendered, "CustomResourceDefinition") == of_kind(
        written, "CustomResourceDefinition"
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, CLUSTER_WIDE], ids=["restricted", "cluster-wide"])
def test_platform_fits_the_schemas_of_kubernetes(platform, values, version):
    for obj in render(platform, values):
        kubernetes_validate.validate(obj, version, strict=True)


def test_longest_name_of_a_release_leaves_room_for_the_label_of_its_pods(platform):
    """A StatefulSet's name with a dash and ten digits is a label of its pods."""
    objects = render(platform, name="r" * 53)
    operator, sets = of_kind(objects, "Deployment"), of_kind(objects, "StatefulSet")
    (manager,) = [spec for name, spec in operator.items() if name.endswith("controller-manager")]
    arguments = " ".join(manager["spec"]["template"]["spec"]["containers"][0]["args"])

    assert len(sets) == 2
    for name in sets:
        assert len(name) <= 52
        assert name in of_kind(objects, "Service")
        assert f"{name}.dynamo-kubernetes:" in arguments


def test_platform_has_the_pods_of_the_guide(platform):
    containers = {name: len(spec["containers"]) for name, spec in pod_specs(render(platform))}

    assert containers == {
        "dynamo-platform-dynamo-operator-controller-manager": 2,
        "dynamo-platform-etcd": 1,
        "dynamo-platform-nats": 2,
        "dynamo-platform-nats-box": 1,
    }


def test_pods_keep_to_the_restricted_level_and_ask_for_resources(platform):
    for name, spec in pod_specs(render(platform)):
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name


def test_no_image_is_untagged_or_of_a_vendor(platform):
    for name, spec in pod_specs(render(platform)):
        for container in spec["containers"]:
            assert ":" in container["image"], name
            assert not container["image"].startswith(("nvcr.io", "bitnami", "docker.io/bitnami"))


def test_namespace_restriction_needs_no_rights_in_the_cluster(platform):
    objects = render(platform)
    manager = of_kind(objects, "Deployment")["dynamo-platform-dynamo-operator-controller-manager"]
    (arguments,) = (
        c["args"]
        for c in manager["spec"]["template"]["spec"]["containers"]
        if c["name"] == "manager"
    )

    assert "--restrictedNamespace=dynamo-kubernetes" in arguments
    assert "--etcdAddr=dynamo-platform-etcd.dynamo-kubernetes:2379" in arguments
    assert "--natsAddr=nats://dynamo-platform-nats.dynamo-kubernetes:4222" in arguments
    assert not {obj["kind"] for obj in objects} & {"ClusterRole", "ClusterRoleBinding"}


def test_operator_that_is_restricted_to_a_namespace_has_its_lease_there(platform):
    """There an operator of the whole cluster looks for it."""
    restriction = {"enabled": True, "targetNamespace": "team"}
    objects = render(platform, {"dynamo-operator": {"namespaceRestriction": restriction}})
    manager = of_kind(objects, "Deployment")["dynamo-platform-dynamo-operator-controller-manager"]
    arguments = [c.get("args", ()) for c in manager["spec"]["template"]["spec"]["containers"]]
    name = "dynamo-platform-dynamo-operator-leader-election"

    assert "--lease-namespace=team" in arguments[0]
    for kind in ("Role", "RoleBinding"):
        assert of_kind(objects, kind)[name]["metadata"]["namespace"] == "team"


def test_operator_of_the_whole_cluster_may_read_leases_and_no_more(platform):
    verbs = {verb for _, kind, verb in rights_of_operator(platform) if kind == "leases"}

    assert verbs == {"get"}


def test_rules_of_the_operator_name_each_verb_and_resource(platform):
    objects = render(platform, CLUSTER_WIDE)
    roles = [*of_kind(objects, "ClusterRole").values(), *of_kind(objects, "Role").values()]

    assert len(roles) == 4
    for rule in itertools.chain(*(role["rules"] for role in roles)):
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])
        if "pods" in rule["resources"]:
            assert rule["verbs"] == ["get", "list", "watch"]
        if "secrets" in rule["resources"]:
            assert not {"list", "watch", "update", "delete"} & set(rule["verbs"])


def rights_of(rules):
    """Return each group, resource and verb that rules allow."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def rights_of_operator(platform):
    roles = of_kind(render(platform, CLUSTER_WIDE), "ClusterRole")
    return rights_of(roles["dynamo-platform-dynamo-operator-manager"]["rules"])


def test_operator_may_grant_what_it_grants(platform):
    assert rights_of(identity.PLANNER_RULES) <= rights_of_operator(platform)


def test_operator_may_replace_nothing_but_what_its_pods_may_and_owners_ask_for(platform):
    """It applies and patches; who has its account may not delete accounts and roles either."""
    rights = rights_of_operator(platform)
    updated = {kind for _, kind, verb in rights if verb == "update" and "/finalizers" not in kind}
    deleted = {kind for _, kind, verb in rights if verb == "delete"}

    assert all(group == "nvidia.com" for group, kind, _ in rights if kind in updated)
    assert not deleted & {"serviceaccounts", "roles", "rolebindings", "events", "leases", "jobs"}


def test_operator_may_read_and_delete_single_objects_only_where_it_or_its_pods_do(platform):
    rights = rights_of_operator(platform)
    own_reads = {"secrets", "leases", "pods/log", "customresourcedefinitions"}
    own_reads |= {"mutatingwebhookconfigurations", "validatingwebhookconfigurations"}
    own_deletions = {"dynamocomponentdeployments", "dynamographdeploymentscalingadapters"}
    granted = rights_of(identity.PLANNER_RULES)
    others = rights - granted

    assert {kind for _, kind, verb in others if verb == "get"} <= own_reads
    assert {kind for _, kind, verb in others if verb == "update" and "/" not in kind} == set()
    deleted = {kind for group, kind, verb in others if verb == "delete" and group == "nvidia.com"}
    assert deleted == own_deletions


def test_operator_may_block_the_deletion_of_owners_where_a_cluster_asks_for_that(platform):
    """The admission plugin OwnerReferencesPermissionEnforcement, which OpenShift has."""
    owners = (
        "dynamographdeployments",
        "dynamocomponentdeployments",
        "dynamographdeploymentrequests",
    )

    assert {("nvidia.com", f"{owner}/finalizers", "update") for owner in owners} <= (
        rights_of_operator(platform)
    )


def test_operator_may_register_webhooks_that_were_deleted(platform):
    """An apply that makes an object needs the right to create, which can be had for one name: the path says it."""
    roles = of_kind(render(platform, CLUSTER_WIDE), "ClusterRole")
    name = "dynamo-platform-dynamo-operator"
    (rule,) = (
        rule
        for rule in roles[f"{name}-manager"]["rules"]
        if rule["apiGroups"] == ["admissionregistration.k8s.io"]
    )

    assert rule["resourceNames"] == [name]
    assert {"get", "create", "patch"} == set(rule["verbs"])


def test_job_after_an_uninstallation_runs_where_the_operator_may(platform):
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    manager = {"controllerManager": {"tolerations": tolerations}}
    objects = render(platform, {"dynamo-operator": {**CLUSTER_WIDE["dynamo-operator"], **manager}})
    (job,) = of_kind(objects, "Job").values()

    assert job["spec"]["template"]["spec"]["tolerations"] == tolerations


def test_operator_may_not_change_or_delete_claims(platform):
    verbs = {
        verb for _, kind, verb in rights_of_operator(platform) if kind == "persistentvolumeclaims"
    }

    assert verbs == {"list", "watch", "create"}


def test_webhooks_are_those_that_the_operator_registers(platform):
    objects = render(platform, CLUSTER_WIDE)
    name, namespace = "dynamo-platform-dynamo-operator", "dynamo-kubernetes"
    settings = OperatorConfig(webhook_name=name, webhook_service=f"{namespace}/{name}-webhook")
    registered = webhooks.make_configurations(
        settings,
        lambda path: {
            "service": {
                "namespace": namespace,
                "name": f"{name}-webhook",
                "path": path,
                "port": 443,
            }
        },
    )

    for configuration in registered:
        rendered = of_kind(objects, configuration["kind"])[name]
        assert rendered["webhooks"] == configuration["webhooks"]
    assert of_kind(objects, "Job").keys() == {f"{name}-cleanup"}
    assert f"{name}-webhook" in of_kind(objects, "Service")
    restricted = {obj["kind"] for obj in render(platform)}
    assert not restricted & {
        "ValidatingWebhookConfiguration",
        "MutatingWebhookConfiguration",
        "Job",
    }


def test_certificate_can_come_from_an_issuer(platform):
    webhook = {"certManager": {"enabled": True, "issuerRef": {"name": "own"}}}
    values = {"dynamo-operator": {**CLUSTER_WIDE["dynamo-operator"], "webhook": webhook}}
    objects = render(platform, values)
    (certificate,) = of_kind(objects, "Certificate").values()
    pod = of_kind(objects, "Deployment")["dynamo-platform-dynamo-operator-controller-manager"]
    volumes = pod["spec"]["template"]["spec"]["volumes"]

    assert certificate["spec"]["issuerRef"]["name"] == "own"
    assert {"secretName": certificate["spec"]["secretName"]} in [v.get("secret") for v in volumes]
    webhook["certManager"].pop("issuerRef")
    with pytest.raises(helm.HelmError, match=r"issuerRef\.name: expected the name of an Issuer"):
        render(platform, values)


def test_network_policies_cover_operator_etcd_and_nats(platform):
    assert of_kind(render(platform), "NetworkPolicy").keys() == {
        "dynamo-platform-dynamo-operator",
        "dynamo-platform-etcd",
        "dynamo-platform-nats",
    }
    assert not of_kind(render(platform, {"networkPolicy": {"enabled": False}}), "NetworkPolicy")


def test_log_level_of_the_operator_is_taken_and_checked(platform):
    values = helm.parse_set_string("operator.logLevel=DEBUG")
    deployments = of_kind(render(platform, values), "Deployment")
    manager = deployments["dynamo-platform-dynamo-operator-controller-manager"]
    environment = manager["spec"]["template"]["spec"]["containers"][0]["env"]

    assert environment[0] == {"name": "DYN_LOG", "value": "debug"}
    with pytest.raises(helm.HelmError, match="logLevel"):
        helm.Chart.load(platform).validate_schema({"operator": {"logLevel": "loud"}})


@pytest.fixture
def services(archives):
    def read(expression):
        values = helm.parse_set_string(expression) if expression else {}
        objects = render(
            archives["dynamo-vllm-0.4.1.tgz"], values, name="dynamo-vllm", namespace="dynamo-system"
        )
        graph = of_kind(objects, "DynamoGraphDeployment")["dynamo-vllm"]
        return graph["spec"]["services"]

    return read


def command_line(service):
    return " ".join(service["extraPodSpec"]["mainContainer"]["args"])


def test_discovery_of_the_pods_is_a_value(platform):
    values = helm.parse_set_string("dynamo-operator.discoveryBackend=kubernetes")
    deployments = of_kind(render(platform, values), "Deployment")
    manager = deployments["dynamo-platform-dynamo-operator-controller-manager"]
    arguments = manager["spec"]["template"]["spec"]["containers"][0]["args"]

    assert "--discovery-backend=kubernetes" in arguments
    with pytest.raises(helm.HelmError, match="discoveryBackend"):
        helm.Chart.load(platform).validate_schema({"dynamo-operator": {"discoveryBackend": "x"}})


@pytest.mark.parametrize("name", ["grove", "kai-scheduler"])
def test_chart_says_that_it_does_not_install_a_scheduler(platform, name):
    assert render(platform, {name: {"enabled": False}}) == render(platform)
    with pytest.raises(helm.HelmError, match=f"{name}.enabled: this chart does not install"):
        render(platform, {name: {"enabled": True}})


def test_workers_without_a_type_are_aggregated(services):
    found = services(
        "workers[0].model.path=Qwen/Qwen2-0.5B-Instruct,workers[1].model.path=Qwen/Qwen2-0.5B-Instruct"
    )

    assert list(found) == ["Frontend", "Worker0", "Worker1"]
    assert "--router-mode kv" in command_line(found["Frontend"])
    for name in ("Worker0", "Worker1"):
        assert "subComponentType" not in found[name]
        assert "-prefill-worker" not in command_line(found[name])
    assert list(services("")) == ["Frontend", "Worker0"]


def test_typed_workers_are_disaggregated_and_only_prefill_is_flagged(services):
    path = "model.path=Qwen/Qwen2-0.5B-Instruct"
    found = services(
        f"workers[0].{path},workers[0].workerType=prefill,workers[1].{path},workers[1].workerType=decode"
    )

    assert found["Prefillworker0"]["subComponentType"] == "prefill"
    assert "--is-prefill-worker" in command_line(found["Prefillworker0"])
    assert found["Decodeworker1"]["subComponentType"] == "decode"
    assert "-prefill-worker" not in command_line(found["Decodeworker1"])


def test_worker_gets_a_gpu_for_each_rank_unless_its_resources_say_otherwise(services):
    found = services(
        "workers[0].model.path=m,workers[0].tensorParallelSize=4,workers[1].model.path=m,"
        "workers[2].model.path=m,workers[2].tensorParallelSize=4,workers[2].resources.limits.gpu=8"
    )
    gpus = {name: service["resources"]["limits"].get("gpu") for name, service in found.items()}

    assert gpus == {"Frontend": None, "Worker0": "4", "Worker1": "1", "Worker2": 8}


def test_values_of_a_file_reach_workers_as_they_are_written(archives):
    worker = {
        "model": {"path": "m"},
        "maxModelLen": 1_048_576,
        "extraArgs": ["--seed", 2_000_000, "--swap-space", 0.5],
    }
    values = {
        "workers": [worker, {"model": {"path": "m"}, "maxModelLen": "128k"}],
        "dynamoNamespace": "2026",
        "huggingface": {"existingSecret": "1234"},
    }
    objects = render(archives["dynamo-vllm-0.4.1.tgz"], values, name="dynamo-vllm")
    found = of_kind(objects, "DynamoGraphDeployment")["dynamo-vllm"]["spec"]["services"]

    assert "--max-model-len 1048576 " in command_line(found["Worker0"])
    assert command_line(found["Worker0"]).endswith(" --seed 2000000 --swap-space 0.5")
    assert "--max-model-len 128k " in command_line(found["Worker1"])
    assert {service["dynamoNamespace"] for service in found.values()} == {"2026"}
    assert found["Worker0"]["envFromSecret"] == "1234"


@pytest.mark.parametrize("argument", ["--hf-overrides '{\"a\": 1}'", "--chat-template 'a #b'"])
def test_arguments_with_characters_of_yaml_reach_workers(archives, argument):
    values = {"workers": [{"model": {"path": "m"}, "extraArgs": [argument]}]}
    objects = render(archives["dynamo-vllm-0.4.1.tgz"], values, name="dynamo-vllm")
    found = of_kind(objects, "DynamoGraphDeployment")["dynamo-vllm"]["spec"]["services"]

    assert command_line(found["Worker0"]).endswith(f" {argument}")


def test_pods_are_replaced_when_a_value_changes_that_they_read_at_their_start(services):
    before, after = services(""), services("logLevel=debug")

    for name in ("Frontend", "Worker0"):
        assert before[name]["extraPodMetadata"] != after[name]["extraPodMetadata"]
        assert before[name]["extraPodSpec"] == after[name]["extraPodSpec"]
    assert services("frontend.routerMode=random")["Worker0"] == before["Worker0"]


@pytest.mark.parametrize("names", [("small", "Small"), ("frontend", "other")])
def test_worker_with_the_name_of_another_service_is_refused(archives, names):
    values = {"workers": [{"model": {"path": "m"}, "name": name} for name in names]}

    with pytest.raises(helm.HelmError, match="expected another name than"):
        render(archives["dynamo-vllm-0.4.1.tgz"], values, name="dynamo-vllm")


def test_worker_without_a_model_is_refused_by_name(archives):
    chart = helm.Chart.load(archives["dynamo-vllm-0.4.1.tgz"])

    with pytest.raises(helm.HelmError, match="missing property 'model'"):
        chart.validate_schema({"workers": [{"workerType": "prefill"}]})


def places(values, *place):
    """Return the path to each mapping of a chart's values."""
    yield place
    for key, value in values.items():
        if isinstance(value, dict):
            yield from places(value, *place, key)


@pytest.mark.parametrize("name", sorted(packaging["CHARTS"]))
def test_mistyped_value_is_refused_wherever_it_stands(archives, name):
    chart = helm.Chart.load(archives[f"{name}-0.4.1.tgz"])
    values = yaml.safe_load((packaging["CHARTS"][name] / "values.yaml").read_text())
    chart.validate_schema(values)

    for place in places(values):
        if place[-1:] not in (("requests",), ("limits",)):  # a cluster has resources of its own
            mistyped = functools.reduce(
                lambda inner, key: {key: inner}, reversed(place), {"enabeld": 1}
            )
            with pytest.raises(helm.HelmError, match="'enabeld' not allowed"):
                chart.validate_schema(mistyped)


@pytest.mark.parametrize("name", sorted(packaging["CHARTS"]))
def test_chart_takes_what_a_chart_around_it_gives_to_its_subcharts(archives, name):
    chart = helm.Chart.load(archives[f"{name}-0.4.1.tgz"])

    chart.validate_schema({"global": {"imageRegistry": "registry.example"}, "enabled": True})


def test_mistyped_value_of_a_worker_is_refused(archives):
    chart = helm.Chart.load(archives["dynamo-vllm-0.4.1.tgz"])
    worker = {
        "model": {"path": "m"},
        "name": "w",
        "workerType": "decode",
        "replicas": 0,
        "tensorParallelSize": 2,
        "enforceEager": False,
        "maxModelLen": "128k",
        "gpuMemoryUtilization": 0.9,
        "connector": "nixl",
        "extraArgs": ["--seed", 1],
        "resources": {"limits": {"gpu": 8}},
    }
    chart.validate_schema({"workers": [worker]})

    with pytest.raises(helm.HelmError, match="'maxModelLength' not allowed"):
        chart.validate_schema({"workers": [{**worker, "maxModelLength": 4096}]})
