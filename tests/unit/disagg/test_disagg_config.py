"""Options of prefill routing: which are refused, and which policy they make."""

import pytest

from dynamo.base import errors
from dynamo.disagg import config, policy


def options(**fields):
    return config.PrefillRoutingConfig(**fields)


def conditional(json, queue_threshold=None):
    made = options(router_conditional_disagg=True, router_conditional_disagg_config=json)
    return made.conditional_policy(queue_threshold)


def test_conditional_policy_has_the_originals_defaults():
    assert options().conditional_policy(None) is None
    assert conditional(None) == policy.ConditionalPolicy()


def test_conditional_policy_is_read_from_json():
    assert conditional(
        '{"policy": "isl_or_load", "eff_isl_threshold": 10, "eff_isl_ratio_threshold": 0.5,'
        ' "prefill_busy_threshold": 16, "decode_busy_threshold": 0.9}'
    ) == policy.ConditionalPolicy(
        policy="isl_or_load",
        eff_isl_threshold=10,
        eff_isl_ratio_threshold=0.5,
        prefill_busy_threshold=16,
        decode_busy_threshold=0.9,
    )


def test_threshold_of_the_routers_queue_is_the_default_for_busy_prefill_workers():
    by_load = '{"policy": "prefill_load"}'

    assert conditional(by_load, 2.0).prefill_busy_threshold == 2.0
    with pytest.raises(errors.ConfigError, match="prefill_busy_threshold"):
        conditional(by_load)


@pytest.mark.parametrize(
    ("json", "named"),
    [
        ('{"policy": "load"}', "isl_bounding, prefill_load, isl_or_load"),
        ('{"prefill_busy_threshold": -1}', "prefill_busy_threshold"),
        ('{"eff_isl_ratio_threshold": 2}', "eff_isl_ratio_threshold"),
        ('{"isl": 5}', "isl"),
        ('{"eff_isl_threshold": "x"}', "eff_isl_threshold"),
        ("[]", "JSON object"),
        ("{", "JSON object"),
    ],
)
def test_invalid_policy_is_refused_by_name(json, named):
    made = options(router_conditional_disagg=True, router_conditional_disagg_config=json)

    with pytest.raises(errors.ConfigError, match=named):
        made.check("kv")


def test_json_without_its_flag_is_refused():
    with pytest.raises(errors.ConfigError, match="--router-conditional-disagg"):
        options(router_conditional_disagg_config="{}").check("kv")


@pytest.mark.parametrize(
    "fields",
    [{"enforce_disagg": True}, {"decode_fallback": False}, {"router_conditional_disagg": True}],
)
def test_options_that_decide_in_the_frontend_need_router_mode_kv(fields):
    options(**fields).check("kv")

    with pytest.raises(errors.ConfigError, match="--router-mode kv"):
        options(**fields).check("round-robin")
