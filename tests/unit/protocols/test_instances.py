"""Names of endpoints, and the keys of instances in discovery."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.protocols import instances

words = st.from_regex(r"[a-z0-9_-]{1,8}", fullmatch=True)
INSTANCE = instances.Instance(
    namespace="dynamo",
    component="backend",
    endpoint="generate",
    instance_id=0xABC,
    transport={"tcp": "127.0.0.1:5"},
)


@given(st.lists(words, min_size=1, max_size=3).map(".".join), words, words)
def test_endpoint_name_is_parsed_from_its_text(namespace, component, endpoint):
    name = instances.EndpointName(namespace, component, endpoint)

    assert instances.EndpointName.parse(str(name)) == name


def test_namespace_may_be_nested():
    name = instances.EndpointName.parse("dyn://a.b.backend.generate")

    assert name == instances.EndpointName("a.b", "backend", "generate")
    assert name.path == "a.b/backend/generate"


def test_endpoint_may_be_written_without_its_scheme_as_for_nvidia_dynamo():
    expected = instances.EndpointName("a.b", "backend", "generate")

    assert instances.EndpointName.parse("a.b.backend.generate") == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "dyn://",
        "backend.generate",
        "http://dynamo.backend.generate",
        "dyn://backend.generate",
        "dyn://dynamo..generate",
        "dyn://Dynamo.backend.generate",
        "dyn://dynamo.back end.generate",
        "dyn://dynamo.backend.gen/erate",
        "dyn://.dynamo.backend.generate",
        "dyn://dynamo.backend.generate\n",
    ],
)
def test_malformed_endpoint_is_refused_with_an_example(url):
    with pytest.raises(errors.ConfigError, match=r"dyn://namespace\.component\.endpoint"):
        instances.EndpointName.parse(url)


def test_keys_are_those_of_the_specification():
    assert INSTANCE.name.path == "dynamo/backend/generate"
    assert INSTANCE.key == "v1/instances/dynamo/backend/generate/abc"
    assert INSTANCE.card_key == "v1/mdc/dynamo/backend/generate/abc"


def test_instance_is_unchanged_by_discovery_and_carries_its_type():
    value = msgspec.json.encode(INSTANCE)

    assert msgspec.json.decode(value)["type"] == "Endpoint"
    assert msgspec.json.decode(value, type=instances.Instance) == INSTANCE


@pytest.mark.parametrize(
    ("own", "other", "is_covered"),
    [
        ("", "anything", True),
        ("a", "a", True),
        ("a", "a-0123abcd", True),
        ("a", "a-0123abcde", False),
        ("a", "a-disagg00", False),
        ("a", "b", False),
    ],
)
def test_namespace_covers_its_generations(own, other, is_covered):
    assert instances.covers_namespace(own, other) is is_covered
