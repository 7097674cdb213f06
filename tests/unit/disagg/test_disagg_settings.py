"""What a frontend is told of prefill workers."""

import pytest

from dynamo.base import errors
from dynamo.disagg import policy, settings


def wanted(**fields):
    return settings.PrefillRoutingConfig(**fields)


def conditional(given, queue_threshold=None):
    made = wanted(router_conditional_disagg=True, router_conditional_disagg_config=given)
    return made.conditional(queue_threshold)


def test_the_originals_condition_has_its_defaults():
    assert wanted().conditional(None) is None
    assert conditional(None) == policy.Conditional()


def test_what_is_told_is_read():
    assert conditional(
        '{"policy": "isl_or_load", "eff_isl_threshold": 10, "eff_isl_ratio_threshold": 0.5,'
        ' "prefill_busy_threshold": 16, "decode_busy_threshold": 0.9}'
    ) == policy.Conditional(
        policy="isl_or_load",
        eff_isl_threshold=10,
        eff_isl_ratio_threshold=0.5,
        prefill_busy_threshold=16,
        decode_busy_threshold=0.9,
    )


def test_when_a_prefill_worker_is_busy_the_routers_queue_says_if_nothing_else_does():
    by_load = '{"policy": "prefill_load"}'

    assert conditional(by_load, 2.0).prefill_busy_threshold == 2.0
    with pytest.raises(errors.ConfigError, match="prefill_busy_threshold"):
        conditional(by_load)


@pytest.mark.parametrize(
    ("given", "named"),
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
def test_what_makes_no_sense_is_refused_by_name(given, named):
    made = wanted(router_conditional_disagg=True, router_conditional_disagg_config=given)

    with pytest.raises(errors.ConfigError, match=named):
        made.check("kv")


def test_a_condition_needs_its_flag():
    with pytest.raises(errors.ConfigError, match="--router-conditional-disagg"):
        wanted(router_conditional_disagg_config="{}").check("kv")


@pytest.mark.parametrize(
    "fields",
    [{"enforce_disagg": True}, {"decode_fallback": False}, {"router_conditional_disagg": True}],
)
def test_what_the_frontend_decides_it_decides_in_mode_kv(fields):
    wanted(**fields).check("kv")

    with pytest.raises(errors.ConfigError, match="--router-mode kv"):
        wanted(**fields).check("round-robin")
