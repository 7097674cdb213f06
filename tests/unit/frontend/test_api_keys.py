"""The file of API keys, and the key of a request."""

import hashlib

import pytest

from dynamo.base import errors
from dynamo.frontend.admission import api_keys

SECRET = "sk-alice-0123456789"
FILE = f"""
[tenants.acme]
tokens_per_minute = 1000

[[keys]]
name = "alice"
sha256 = "{hashlib.sha256(SECRET.encode()).hexdigest().upper()}"
tenant = "acme"
models = ["m"]
requests_per_minute = 5

[[keys]]
name = "bob"
key = "sk-bob-0123456789"
admin = true
"""


def registry_of(content=FILE):
    registry = api_keys.ApiKeyRegistry()
    registry.replace_keys(api_keys.parse_key_file(content), 0.0)
    return registry


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET} "},
        {"x-api-key": SECRET},
        {"authorization": "Basic abc", "x-api-key": SECRET},
    ],
)
def test_key_is_read_from_either_header(headers):
    api_key = registry_of().authenticate(headers)

    assert api_key.entry.name == "alice"
    assert [account.name for account in api_key.accounts] == ["key 'alice'", "tenant 'acme'"]
    assert api_key.allows_model("m")
    assert not api_key.allows_model("other")


def test_admin_key_without_models_allows_all_models():
    api_key = registry_of().authenticate({"x-api-key": "sk-bob-0123456789"})

    assert api_key.entry.admin
    assert api_key.allows_model("anything")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "expected an API key"),
        ({"authorization": "Basic abc"}, "expected an API key"),
        ({"x-api-key": ""}, "not valid"),
        ({"x-api-key": "sk-wrong"}, "not valid"),
        ({"x-api-key": hashlib.sha256(SECRET.encode()).hexdigest()}, "not valid"),
    ],
)
def test_request_without_a_valid_key_is_unauthenticated(headers, words):
    with pytest.raises(errors.Unauthenticated, match=words) as caught:
        registry_of().authenticate(headers)

    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("keys = 3", "array"),
        ("[[keys", "TOML"),
        ('[[keys]]\nname = "a"', "either key or sha256"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nsha256 = "00"', "regex"),
        ('[[keys]]\nname = "a"\nkey = "short"', "length >= 8"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nrequests_per_minute = 0', ">= 1"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nrpm = 1', "rpm"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\ntenant = "x"', r"\[tenants.x\]"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\n[[keys]]\nname = "a"\nkey = "sk-secret-2"', "name of its own"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\n[[keys]]\nname = "b"\nkey = "sk-secret-1"', "the same key"),
    ],
)  # fmt: skip
def test_error_of_a_key_file_names_the_fault_without_keys(content, words):
    with pytest.raises(errors.ConfigError, match=words) as caught:
        api_keys.parse_key_file(content)

    assert "sk-secret" not in str(caught.value)


def test_new_key_file_keeps_usage_and_drops_missing_keys():
    registry = registry_of()
    api_key = registry.authenticate({"x-api-key": SECRET})
    api_key.accounts[0].num_streams = 3
    registry.replace_keys(
        api_keys.parse_key_file(
            FILE.replace("requests_per_minute = 5", "").split('[[keys]]\nname = "bob')[0]
        ),
        1.0,
    )
    again = registry.authenticate({"x-api-key": SECRET})

    assert again.accounts[0].num_streams == 3
    assert again.accounts[0].requests is None
    assert len(registry) == 1
    with pytest.raises(errors.Unauthenticated):
        registry.authenticate({"x-api-key": "sk-bob-0123456789"})
