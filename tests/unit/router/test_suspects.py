"""Which requests are taken for what their workers died of."""

import pytest

from dynamo.router import retry_rules


@pytest.mark.parametrize(
    ("num_deaths", "is_prepared", "expected"),
    [(1, True, False), (2, True, True), (0, False, False), (1, False, True)],
)
def test_request_is_a_suspect_after_a_death_in_preparation_or_two(
    num_deaths, is_prepared, expected
):
    assert retry_rules.is_suspect(num_deaths, is_prepared=is_prepared) is expected
