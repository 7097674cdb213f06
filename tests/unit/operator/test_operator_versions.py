"""The versions of a DynamoGraphDeployment: nothing is lost between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.operator import api_types, versions

texts = st.sampled_from(("a", "b", "c"))
names = st.sampled_from(("Frontend", "Decode", "prefill", "Aux"))
labels = st.dictionaries(texts, texts, max_size=2)


def some(**fields):
    """Return mappings with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


secrets = st.sampled_from(
    (
        [{"secretRef": {"name": "s"}}],
        [{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
        [{"secretRef": {"name": "s", "optional": True}}],
    )
)
containers = some(image=texts, args=st.lists(texts, max_size=2), envFrom=secrets)
sidecars = st.lists(
    st.fixed_dictionaries({"name": st.just("side"), "image": texts}), min_size=1, max_size=1
)
common = {
    "replicas": st.integers(0, 3),
    "dynamoNamespace": texts,
    "resources": st.just({"limits": {"gpu": "1"}}),
    "envs": st.lists(st.fixed_dictionaries({"name": texts}), max_size=2),
    "ingress": st.just({"enabled": True}),
}
services = some(
    **common,
    componentType=st.sampled_from(("frontend", "worker", "planner")),
    subComponentType=st.sampled_from(("prefill", "decode")),
    sharedMemory=st.sampled_from(({"size": "1Gi"}, {"disabled": True}, {})),
    envFromSecret=texts,
    extraPodMetadata=st.fixed_dictionaries({"labels": labels}),
    extraPodSpec=some(
        nodeSelector=labels,
        mainContainer=containers | st.builds(lambda main: {**main, "name": "engine"}, containers),
        containers=sidecars,
    ),
)
components = some(
    **common,
    type=st.sampled_from(("frontend", "worker", "prefill", "decode", "planner")),
    sharedMemorySize=st.just("1Gi"),
    podTemplate=some(
        metadata=some(labels=labels, annotations=labels),
        spec=some(
            nodeSelector=labels,
            containers=st.builds(
                lambda main, more: [{**main, "name": "main"}, *more],
                containers,
                sidecars | st.just([]),
            ),
        ),
    ).filter(bool),
)
graph_fields = {"backendFramework": st.just("vllm"), "dynamoGraph": texts}


def graph(version, spec, **metadata):
    metadata = {"name": "g", "resourceVersion": "1", **metadata}
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata,
        "spec": spec,
    }


@given(
    some(
        services=st.dictionaries(names, services, max_size=4), envs=common["envs"], **graph_fields
    ),
    labels,
)
def test_object_that_is_read_in_the_later_version_and_written_back_is_the_same(spec, annotations):
    metadata = {"annotations": annotations} if annotations else {}
    stored = graph("v1alpha1", spec, **metadata)
    shown = versions.convert(stored, versions.BETA_API_VERSION)

    assert versions.convert(shown, api_types.API_VERSION) == stored
    shown["metadata"].get("annotations", {}).pop(versions.MAIN_NAMES_ANNOTATION, None)
    assert shown["metadata"].get("annotations", {}) == annotations


@given(
    some(
        components=st.dictionaries(names, components, max_size=4).map(
            lambda by_name: [{"name": name, **fields} for name, fields in by_name.items()]
        ),
        env=common["envs"],
        **graph_fields,
    ),
    labels,
)
def test_later_version_is_shown_as_it_was_written(spec, annotations):
    metadata = {"annotations": annotations} if annotations else {}
    written = graph("v1beta1", spec, **metadata)
    stored = versions.convert(written, api_types.API_VERSION)

    assert versions.convert(stored, versions.BETA_API_VERSION) == written
    assert list(stored["spec"].get("services", {})) == [
        c["name"] for c in spec.get("components", ())
    ]


def test_required_secret_stays_required_and_that_of_a_service_may_be_absent():
    def shown(**service):
        beta = versions.convert(
            graph("v1alpha1", {"services": {"A": service}}), versions.BETA_API_VERSION
        )
        return beta["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]["envFrom"]

    reference = [{"secretRef": {"name": "s"}}]

    assert shown(extraPodSpec={"mainContainer": {}}, envFromSecret="s") == reference
    assert (
        shown(extraPodSpec={"mainContainer": {"envFrom": reference}})[0]["secretRef"]["optional"]
        is False
    )


def test_version_that_there_is_not_is_refused():
    with pytest.raises(
        errors.ConfigError, match=r"v1beta1, got nvidia\.com/v1alpha1 and nvidia\.com/v2"
    ):
        versions.convert(graph("v1alpha1", {}), "nvidia.com/v2")
