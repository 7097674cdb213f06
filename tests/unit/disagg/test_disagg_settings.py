"""What a frontend is told of prefill workers."""

import pytest

from dynamo.base import errors
from dynamo.disagg import policy, settings


def wanted(**fields):
    return settings.PrefillRoutingConfig(**fields)


def test_the_originals_condition_has_its_defaults():
    assert wanted().conditional() is None
    assert wanted(router_conditional_disagg=True).conditional() == policy.IslBounding()


def test_what_is_honoured_is_read():
    given = '{"policy": "isl_bounding", "eff_isl_threshold": 10, "eff_isl_ratio_threshold": 0.5}'
    made = wanted(router_conditional_disagg=True, router_conditional_disagg_config=given)

    assert made.conditional() == policy.IslBounding(
        eff_isl_threshold=10, eff_isl_ratio_threshold=0.5
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"policy": "prefill_load"}', "prefill_load"),
        ('{"prefill_busy_threshold": 0.5}', "prefill_busy_threshold"),
        ('{"decode_busy_threshold": 0.5}', "decode_busy_threshold"),
        ('{"isl": 5}', "isl"),
        ('{"eff_isl_threshold": "x"}', "eff_isl_threshold"),
        ("[]", "JSON object"),
        ("{", "JSON object"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(given, named):
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
