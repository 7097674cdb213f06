"""generation_config.json, and the tokens that end an answer."""

import pytest

from dynamo.base import errors
from dynamo.preprocess import options


def test_known_fields_of_the_generation_config_are_read():
    config = {"temperature": 0.6, "top_k": 20, "do_sample": True, "transformers_version": "4.51.0"}

    assert options.read_defaults(config) == options.GenerationDefaults(temperature=0.6, top_k=20)


def test_error_for_an_invalid_value_names_the_file():
    with pytest.raises(errors.ConfigError, match=r"generation_config\.json.*temperature"):
        options.read_defaults({"temperature": "hot"})


@pytest.mark.parametrize(
    ("configs", "own", "expected"),
    [
        ([{"eos_token_id": [5, 6]}, {"eos_token_id": 6}], 7, (5, 6, 7)),
        ([{}, {"eos_token_id": None}], None, ()),
        ([{}, {}], 3, (3,)),
    ],
)
def test_every_file_may_name_ends(configs, own, expected):
    assert options.collect_eos_token_ids(configs, own) == expected
