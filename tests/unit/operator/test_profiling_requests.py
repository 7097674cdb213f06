"""What a DynamoGraphDeploymentRequest becomes: the profiler's Job, and the deployment of its recommendation."""

import msgspec
import pytest
import yaml

from dynamo.base import errors
from dynamo.operator import api_types, objects, profiling_requests, reviews
from dynamo.operator.settings import OperatorConfig
from dynamo.planner import profile_files, profile_sweep, profiling
from dynamo.planner.policies import Targets
from planner_cases import make_profile

LOG = 'x\n{"mode":"agg","num_prefill":0,"num_decode":2}\n'


def make_request(status=None, **spec):
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "r", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"model": "m", **spec},
        "status": status or {},
    }


def decide(request, log="", **settings):
    observed = objects.Observed(now="2026-11-23T10:00:00Z")
    return profiling_requests.decide(request, observed, OperatorConfig(**settings), log)


def last_condition(decision):
    return decision.status["conditions"][-1]


def test_profiler_of_a_real_engine_gets_a_gpu_and_no_more_rights_than_it_needs():
    (job,) = decide(make_request(backend="sglang"), restricted_security_context=True).create
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "sglang" in container["args"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_profiler_runs_where_and_with_what_its_request_says():
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    config = {"tolerations": tolerations, "resources": {"limits": {"memory": "64Gi"}}}
    (job,) = decide(make_request(profilingConfig=config)).create
    pod = job["spec"]["template"]["spec"]

    assert pod["tolerations"] == tolerations
    assert pod["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": "1", "memory": "64Gi"}
    }


def test_profiler_that_cannot_start_says_why():
    (job,) = decide(make_request()).create
    metadata = {"name": "p", **job["spec"]["template"]["metadata"]}
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    main = {"name": "main", "image": "i:1", "state": {"waiting": waiting}}
    status = {"phase": "Pending", "containerStatuses": [main]}
    observed = objects.Observed(
        now="",
        objects={("Job", "r-profile"): job},
        pods=[{"metadata": metadata, "status": status}],
    )
    decision = profiling_requests.decide(make_request(), observed, OperatorConfig(), "")

    assert decision.status["state"] == "Profiling"
    assert last_condition(decision)["reason"] == "ImagePull"
    assert last_condition(decision)["message"] == "pod p cannot pull i:1: no such image"


def test_log_without_a_recommendation_fails_and_makes_nothing():
    decision = decide(make_request(), "starting\n")

    assert decision.status["state"] == "Failed"
    assert last_condition(decision)["reason"] == "Unreadable"
    assert "no recommendation" in last_condition(decision)["message"]
    assert decision.create == ()


def test_recommendation_that_is_not_applied_stands_in_the_status_alone():
    overrides = {"annotations": {"a": "b"}, "workersImage": "mine:1"}
    decision = decide(make_request(deploymentOverrides=overrides), LOG)
    deployment = decision.status["generatedDeployment"]
    worker = deployment["spec"]["services"]["Worker"]

    assert decision.create == ()
    assert (decision.status["state"], last_condition(decision)["reason"]) == ("Ready", "NotApplied")
    assert deployment["metadata"]["annotations"] == {"a": "b"}
    assert (worker["replicas"], worker["extraPodSpec"]["mainContainer"]["image"]) == (2, "mine:1")
    assert worker["resources"] == {"limits": {"gpu": "1"}}


def test_recommendation_that_went_with_its_pod_is_said():
    """Pods go with their node, or are collected, while no operator runs."""
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    job = {"kind": "Job", "metadata": {"name": "r-profile"}, "status": complete}
    observed = objects.Observed(now="", objects={("Job", "r-profile"): job})
    decision = profiling_requests.decide(make_request(), observed, OperatorConfig(), "")

    assert decision.status["state"] == "Failed"
    assert last_condition(decision)["reason"] == "ProfilingFailed"
    assert "kubectl delete job r-profile" in last_condition(decision)["message"]


def test_empty_log_of_a_finished_profiler_fails():
    labels = {objects.REQUEST_LABEL: "r"}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Succeeded"}}
    observed = objects.Observed(now="", pods=[pod])
    decision = profiling_requests.decide(make_request(), observed, OperatorConfig(), "")

    assert last_condition(decision)["reason"] == "Unreadable"


@pytest.mark.parametrize("generated", [None, {"kind": "DynamoGraphDeployment"}])
def test_log_is_read_until_there_is_a_deployment(generated):
    labels = {objects.REQUEST_LABEL: "r"}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Succeeded"}}
    observed = objects.Observed(now="", pods=[pod])
    request = make_request({"generatedDeployment": generated})

    expected = None if generated else "p"
    assert expected == profiling_requests.find_finished_pod(request, observed)


def recommend(tmp_path, num_workers, **options):
    """Return the manifest that the profiler writes for a recommendation of so many workers of two GPUs."""
    settings = profiling.ProfilerConfig(**options)
    choice = profile_sweep.recommend(
        make_profile(), isl=3000, osl=150, targets=Targets(), num_workers=num_workers, num_gpus=2
    )
    graph = profiling.make_deployment(choice, settings, has_gpus=True)
    profile_files.write_deployment(graph, "two lines\nof notes", tmp_path / "deployment.yaml")
    text = (tmp_path / "deployment.yaml").read_text()
    assert text.startswith("# two lines\n# of notes\napiVersion: nvidia.com/v1alpha1\n")
    return yaml.safe_load(text)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "vllm", "model": "Qwen/Qwen3-0.6B", "worker_flags": "-tp 2"},
        {"backend": "native", "model": f"/models/{'x' * 80}"},
        {"backend": "mocker"},
    ],
    ids=lambda options: options["backend"],
)
async def test_deployment_that_the_profiler_writes_is_valid(
    cluster, tmp_path, num_workers, options
):
    written = recommend(tmp_path, num_workers, **options)
    namespaced = {**written, "metadata": {**written["metadata"], "namespace": "default"}}
    stored = await cluster.create(namespaced)
    request = reviews.AdmissionRequest(uid="u", object=stored)
    answer = reviews.answer_validation(reviews.AdmissionReview(request), OperatorConfig())

    assert stored["spec"] == written["spec"]
    assert answer["response"] == {"uid": "u", "allowed": True}


async def test_deployment_that_is_not_valid_is_refused(cluster, tmp_path):
    written = recommend(tmp_path, 1, backend="mocker")
    written["spec"]["services"]["Worker"]["replicas"] = -1

    with pytest.raises(errors.InvalidRequest, match="replicas"):
        await cluster.create(
            {**written, "metadata": {**written["metadata"], "namespace": "default"}}
        )


def test_worker_that_the_profiler_recommends_has_its_flags_and_gpus(tmp_path):
    written = recommend(tmp_path, 1, backend="vllm", model="Qwen/Qwen3-0.6B", worker_flags="-tp 2")
    worker = written["spec"]["services"]["Worker"]

    assert written["metadata"]["name"] == "vllm-qwen3-0-6b"
    assert worker["extraPodSpec"]["mainContainer"] == {
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", "Qwen/Qwen3-0.6B", "-tp", "2"],
    }
    assert worker["resources"] == {"limits": {"gpu": "2"}}


def test_request_gives_workers_the_gpus_of_the_recommendation():
    log = '{"mode":"disagg","num_prefill":1,"num_decode":2,"gpus_per_worker":4}\n'
    services = decide(make_request(), log).status["generatedDeployment"]["spec"]["services"]

    assert services["PrefillWorker"]["resources"] == {"limits": {"gpu": "4"}}
    assert services["Worker"]["resources"] == {"limits": {"gpu": "4"}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"profilingConfig": {"config": {"sla": {"ttft": -1}}}}, "config.sla.ttft"),
        ({"profilingConfig": {"config": {"sla": {"isl": 0}}}}, "config.sla.isl"),
        ({"profilingConfig": {"config": {"sweep": {"budgetMinutes": 0}}}}, "sweep.budgetMinutes"),
        ({"deploymentOverrides": {"name": "B_ad"}}, "spec.deploymentOverrides.name"),
        ({"deploymentOverrides": {"namespace": "prod"}}, "namespace: expected default, that of"),
    ],
)
def test_target_or_name_that_cannot_be_is_refused_before_a_worker_is_measured(spec, says):
    decision = decide(make_request(**spec))

    assert decision.status["state"] == "Failed"
    assert last_condition(decision)["type"] == "Validation"
    assert says in last_condition(decision)["message"]
    assert not decision.create


def test_name_of_a_request_that_no_service_can_have_is_refused_before_a_worker_is_measured():
    request = make_request()
    request["metadata"]["name"] = "qwen2.5"
    decision = decide(request)

    assert last_condition(decision)["type"] == "Validation"
    assert "dynamo-qwen2.5, by default" in last_condition(decision)["message"]
    assert not decision.create
    request["spec"]["deploymentOverrides"] = {"name": "qwen"}
    assert decide(request).create
    request["spec"]["deploymentOverrides"] = {}
    request["status"] = {"generatedDeployment": {"kind": "DynamoGraphDeployment"}}
    assert decide(request).status["state"] == "Ready"  # it was measured before


def test_request_that_was_changed_meanwhile_does_not_get_what_was_measured_before():
    (job,) = decide(make_request()).create
    pod = {**job["spec"]["template"], "status": {"phase": "Succeeded"}}
    pod["metadata"] |= {"name": "p"}
    changed = make_request()
    changed["spec"]["model"] = "other"
    both = objects.Observed(now="", objects={("Job", "r-profile"): job}, pods=[pod])
    refused = profiling_requests.decide(changed, both, OperatorConfig(), "")

    assert profiling_requests.find_finished_pod(make_request(), both) == "p"
    assert profiling_requests.find_finished_pod(changed, both) is None
    assert (refused.status["state"], refused.create) == ("Failed", ())
    assert "kubectl delete job r-profile" in last_condition(refused)["message"]
    after = objects.Observed(now="", pods=[pod])  # its pods go after the Job
    (again,) = profiling_requests.decide(changed, after, OperatorConfig(), "").create
    assert "other" in again["spec"]["template"]["spec"]["containers"][0]["args"]


def test_status_names_the_generation_that_it_is_of():
    """Its definition keeps the field, since the type is what the definition is made of."""
    request = make_request()
    request["metadata"]["generation"] = 3
    status = msgspec.convert(decide(request).status, api_types.RequestStatus)

    assert status.observed_generation == 3


def test_fields_without_effect_are_named_where_the_specification_is_found_valid():
    profiling = {
        "configMapRef": {"name": "c"},
        "outputPVC": "p",
        "profilerImage": "i",
        "resources": {"limits": {"memory": "1Gi"}},
        "config": {"sla": {"isl": 9, "tft": 1}, "hardware": {"numGpusPerNode": 8}, "engine": {}},
    }
    overrides = {"workersImage": "i", "workerImage": "j"}
    idle = {"enableGpuDiscovery": True, "deploymentOverrides": overrides}
    first, *_ = decide(make_request(profilingConfig=profiling, **idle)).status["conditions"]

    assert first["status"] == "True"
    assert first["message"].removeprefix("no effect: ").split(", ") == [
        "spec.enableGpuDiscovery",
        "spec.profilingConfig.configMapRef",
        "spec.profilingConfig.outputPVC",
        "spec.profilingConfig.config.sla.tft",
        "spec.profilingConfig.config.hardware.numGpusPerNode",
        "spec.profilingConfig.config.engine",
        "spec.deploymentOverrides.workerImage",
    ]


def test_request_whose_fields_all_count_has_no_note():
    first, *_ = decide(make_request(enableGpuDiscovery=False)).status["conditions"]

    assert first["message"] == ""
