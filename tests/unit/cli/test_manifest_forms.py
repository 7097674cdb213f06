"""Manifests in forms that no cluster serves become ones that the operator takes, and nothing is lost in silence."""

import io
import pathlib
import re

import pytest
import yaml

from dynamo.base import errors
from dynamo.cli import kube, kube_manifests, manifest_forms
from operator_cluster import DictCluster

SHARED = pathlib.Path(__file__).parents[4] / "shared"
SHORT = {
    "apiVersion": "v1alpha1.dynamo.nvidia.com",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "short"},
}


def short(**spec):
    return {**SHORT, "spec": {"model": "Qwen/Qwen3-0.6B", **spec}}


def main_of(converted, service):
    services = converted.document["spec"]["services"]
    return services[service]["extraPodSpec"]["mainContainer"]


def test_short_aggregated_form_of_the_article():
    amounts = {"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"}
    workers = {"replicas": 3, "resources": {"requests": amounts, "limits": amounts}}
    converted = manifest_forms.convert(short(backend="vllm", workers=workers))
    services = converted.document["spec"]["services"]

    assert converted.notes == []
    assert services.keys() == {"Frontend", "VllmDecodeWorker"}
    assert services["VllmDecodeWorker"]["replicas"] == 3
    assert services["VllmDecodeWorker"]["resources"]["limits"] == {
        "gpu": "1",
        "cpu": "4",
        "memory": "16Gi",
    }
    main = main_of(converted, "VllmDecodeWorker")
    assert (main["command"], main["args"]) == (
        ["python3", "-m", "dynamo.vllm"],
        ["--model", "Qwen/Qwen3-0.6B"],
    )


def test_short_disaggregated_form_with_tiers_and_planner():
    converted = manifest_forms.convert(
        short(
            version="v0.5.0",
            backend="sglang",
            deployment_mode="disaggregated",
            kvbm={"enabled": True, "storage_tiers": ["hbm", "host_dram", "nvme_ssd", "tape"]},
            planner={"enabled": True, "scaling_mode": "sla_based", "target_ttft_ms": 500},
            frontend={"image": "x"},
            colour="red",
        )
    )
    services = converted.document["spec"]["services"]
    prefill = services["SGLangPrefillWorker"]

    assert services.keys() == {"Frontend", "SGLangDecodeWorker", "SGLangPrefillWorker", "Planner"}
    assert main_of(converted, "Frontend")["image"].endswith("sglang-runtime:0.5.0")
    assert "--is-prefill-worker" in main_of(converted, "SGLangPrefillWorker")["args"]
    assert [env["name"] for env in prefill["envs"]] == [
        "DYN_KVBM_CPU_CACHE_GB",
        "DYN_KVBM_DISK_CACHE_GB",
        "DYN_KVBM_DISK_CACHE_DIR",
    ]
    assert "--ttft=500" in main_of(converted, "Planner")["args"]
    notes = " ".join(converted.notes)
    for words in (
        "spec.colour",
        "spec.frontend.image",
        "tape is no tier",
        "dynamo-pvc",
        "prefill workers of sglang do not start",
    ):
        assert words in notes


def test_fields_of_parts_of_the_short_form_without_effect_are_said():
    planner = {"enabled": True, "target_itl_ms": 50, "min_workers": 2}
    converted = manifest_forms.convert(short(planner=planner, kvbm={"host_gb": 8}))

    assert converted.notes == [
        "spec.kvbm.host_gb: there is no such field; it is left out",
        "spec.planner.min_workers: there is no such field; it is left out",
        "spec.planner.target_itl_ms: has no effect without scaling_mode: sla_based",
    ]


BETA = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {}}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({**SHORT, "spec": {"backend": "vllm"}}, "spec.model is missing"),
        (short(backend="jax"), "expected vllm, sglang, trtllm, got jax"),
        (short(deployment_mode="both"), "aggregated or disaggregated, got both"),
        (short(planner={"scaling_mode": "sla"}), "'sla' - at `spec.planner.scaling_mode`"),
        (short(workers=[1]), "got `array` - at `spec.workers`"),
        (short(workers={"replicas": -1}), "Expected `int` >= 0 - at `spec.workers.replicas`"),
        (short(frontend={"resources": {"limits": 1}}), r"at `spec.frontend.resources\[...\]`"),
        ({**BETA, "spec": {"components": [None]}}, r"got `null` - at `\$.spec.components\[0\]`"),
        ({**BETA, "spec": {"components": [{"colour": 1}]}}, "missing required field `name`"),
    ],
)
def test_short_form_that_cannot_be_meant_is_refused(manifest, message):
    with pytest.raises(errors.ConfigError, match=message):
        manifest_forms.convert(manifest)


def test_tiers_of_vllm_are_named_as_missing():
    converted = manifest_forms.convert(short(kvbm={"enabled": True}))

    assert any("--connector lmcache" in note for note in converted.notes)


def test_prefill_workers_of_vllm_keep_the_connector_that_passes_on_blocks():
    converted = manifest_forms.convert(
        short(deployment_mode="disaggregated", kvbm={"enabled": True})
    )

    args = main_of(converted, "VllmPrefillWorker")["args"]
    assert args[args.index("--connector") :] == ["--connector", "kvbm", "nixl"]


def test_workers_of_an_engine_without_tiers_get_no_flag_that_they_refuse():
    converted = manifest_forms.convert(short(backend="trtllm", kvbm={"enabled": True}))

    assert "--connector" not in main_of(converted, "TrtllmDecodeWorker")["args"]
    assert any("TensorRT-LLM has no cache tiers" in note for note in converted.notes)


def test_later_form_keeps_containers_and_says_what_is_left_out():
    main = {"name": "main", "image": "i", "command": ["python3"], "args": ["-m", "dynamo.vllm"]}
    secret = {"envFrom": [{"secretRef": {"name": "hf-token-secret"}}]}
    component = {
        "name": "Decode",
        "type": "decode",
        "replicas": 2,
        "sharedMemorySize": "1Gi",
        "multinode": {"nodeCount": 2},
        "colour": "red",
        "podTemplate": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [main | secret, {"name": "side"}], "nodeSelector": {"x": "y"}},
        },
    }
    spec = {
        "components": [component],
        "env": [{"name": "A", "value": "1"}],
        "backendFramework": "vllm",
        "experimental": {},
    }
    converted = manifest_forms.convert({**SHORT, "apiVersion": "nvidia.com/v1beta1", "spec": spec})
    service = converted.document["spec"]["services"]["Decode"]

    assert (service["componentType"], service["subComponentType"]) == ("worker", "decode")
    assert service["extraPodSpec"]["containers"] == [{"name": "side"}]
    assert service["extraPodSpec"]["mainContainer"] == {
        k: v for k, v in main.items() if k != "name"
    }
    assert service["sharedMemory"] == {"size": "1Gi"}
    assert service["envFromSecret"] == "hf-token-secret"
    assert converted.document["spec"]["envs"] == spec["env"]
    assert len(converted.notes) == 2


def manifests_of_others():
    """Return the short forms of the second article, and the later form among the examples."""
    texts = [path.read_text() for path in sorted(SHARED.glob("seeds/001*.txt"))]
    found = re.findall(
        r"^(apiVersion: v1alpha1\.dynamo.*?)^(?:EOF|```)", "".join(texts), re.M | re.S
    )
    later = SHARED / "data" / "kube" / "manifests" / "agg_router-v1beta1.yaml"
    return [yaml.safe_load(text) for text in found] + (
        [yaml.safe_load(later.read_text())] if later.exists() else []
    )


@pytest.mark.parametrize("manifest", manifests_of_others(), ids=lambda m: m["metadata"]["name"])
def test_manifests_of_others_become_ready(manifest):
    if "model" not in manifest["spec"] and "components" not in manifest["spec"]:
        with pytest.raises(errors.ConfigError, match=r"spec\.model is missing"):
            manifest_forms.convert(manifest)
        manifest["spec"]["model"] = "meta-llama/Llama-2-7b-chat-hf"
    cluster = DictCluster()
    converted = manifest_forms.convert(manifest).document
    converted["metadata"]["namespace"] = "default"
    cluster.put({"kind": "PersistentVolumeClaim", "metadata": {"name": "dynamo-pvc"}})
    cluster.put(converted)
    cluster.settle()

    assert cluster.ready(converted["metadata"]["name"])["status"] == "True"


def test_command_prints_what_a_cluster_serves(tmp_path, capsys):
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump_all([short(colour="red"), {"kind": "ConfigMap"}]))

    assert kube.run(kube.KubeCommandConfig(action="convert", file=str(file))) == 0
    out, err = capsys.readouterr()
    assert [document["kind"] for document in yaml.safe_load_all(out)] == [
        "DynamoGraphDeployment",
        "ConfigMap",
    ]
    assert "spec.colour" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: A", "apiVersion: expected a text, got None"),
        ("apiVersion: v1", "kind: expected a text, got None"),
        ("apiVersion: v1\nkind: [A]", r"kind: expected a text, got \['A'\]"),
        ("apiVersion: v1\nkind: A", r"metadata\.name: expected a text, got None"),
        ("apiVersion: v1\nkind: A\nmetadata: [1]", r"metadata\.name: expected a text, got None"),
        ("apiVersion: v1\nkind: A\nmetadata: {name: 5}", r"metadata\.name: expected a text, got 5"),
    ],
)
def test_manifest_that_is_not_whole_is_named_before_any_is_applied(tmp_path, text, says):
    file = tmp_path / "part.yaml"
    file.write_text(f"apiVersion: v1\nkind: Whole\nmetadata: {{name: a}}\n---\n{text}\n")

    with pytest.raises(errors.ConfigError, match=rf"part\.yaml, manifest 2: {says}"):
        kube.run(kube.KubeCommandConfig(action="apply", file=str(file)))


@pytest.mark.parametrize("text", ["", "a: [", "- 1", pytest.param("[" * 1000, id="deep")])
def test_file_without_manifests_is_refused(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)

    with pytest.raises(errors.ConfigError, match="expected"):
        kube_manifests.read_manifests(str(file))
    with pytest.raises(errors.ConfigError, match="expected a file"):
        kube.run(kube.KubeCommandConfig(action="apply"))


@pytest.mark.parametrize("version", [SHORT["apiVersion"], "nvidia.com/v1beta1"])
@pytest.mark.parametrize("metadata", ["x", 5, [1]])
def test_graph_without_keys_in_its_metadata_is_refused(version, metadata):
    with pytest.raises(errors.ConfigError, match="metadata: expected keys with values, got "):
        manifest_forms.convert({**short(), "apiVersion": version, "metadata": metadata})


@pytest.mark.parametrize("backend", [["vllm"], {"vllm": 1}])
def test_engine_that_is_no_text_is_refused(backend):
    with pytest.raises(errors.ConfigError, match=r"Expected `str \| null`, .* `spec\.backend`"):
        manifest_forms.convert(short(backend=backend))


def test_long_standard_input_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(kube_manifests, "_MOST_BYTES", 20, raising=False)
    text = io.BytesIO(b"kind: Secret\n---\nkind: Service\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(text))

    documents = [each.document for each in kube_manifests.read_manifests("-")]
    assert documents == [{"kind": "Secret"}, {"kind": "Service"}]


def test_manifests_are_read_in_their_own_encoding_whatever_the_locale(monkeypatch, tmp_path):
    text = "kind: Secret\nmetadata:\n  name: né\n"
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode("utf-16"))
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="latin-1")
    monkeypatch.setattr("sys.stdin", stdin)

    for place in (str(file), "-"):
        (manifest,) = kube_manifests.read_manifests(place)
        assert manifest.document["metadata"]["name"] == "né"


def test_manifests_of_a_list_are_converted_one_by_one(tmp_path):
    """As `kubectl get -o yaml` prints several."""
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [short(), other]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(listed))
    converted = kube_manifests.read_manifests(str(tmp_path / "all.yaml"))

    assert [manifest.document["kind"] for manifest in converted] == [SHORT["kind"], "ConfigMap"]
    assert converted[0].document["apiVersion"] == "nvidia.com/v1alpha1"
    assert converted[1].document == other


def test_unknown_field_of_the_short_form_is_named_as_it_is_written():
    document = short(frontend={"port": 1}, workers={"gpus": 1})

    assert manifest_forms.convert(document).notes == [
        "spec.frontend.port: there is no such field; it is left out",
        "spec.workers.gpus: there is no such field; it is left out",
    ]
