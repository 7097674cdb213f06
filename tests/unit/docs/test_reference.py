"""docs/reference.md is up to date, and has what it promises."""

import re

from docs import generate

from dynamo.base import process_setup


def test_reference_equals_what_the_code_generates():
    assert generate.TARGET.read_text() == generate.reference(), "run `make docs`"


def test_each_variable_that_is_read_stands_in_the_reference():
    named = set(re.findall(r"`(DYN_\w+)`", generate.reference()))

    assert named == process_setup.KNOWN


def test_arguments_that_no_option_declares_are_listed_as_no_flag():
    text = generate.reference()

    assert "`--engine-args`" not in text
    assert "All flags of vLLM's engine are taken as well" in text


def test_families_of_each_process_stand_in_the_reference():
    text = generate.reference()

    for family in (
        "dynamo_frontend_requests_total",
        "dynamo_frontend_ignored_parameters_total",
        "dynamo_component_kv_peer_tokens_total",
        "dynamo_kvbm_memory_utilization_percent",
        "dynamo_planner_desired_replicas",
        "dynamo_operator_webhook_denials_total",
        "llm_cache_operations_total",
        "llm_load_avg",
    ):
        assert f"| `{family}` |" in text
