"""Variables that look like ours and are not known are named."""

import pathlib
import re

import dynamo.base
from dynamo.base import process_setup

SOURCE = pathlib.Path(dynamo.base.__file__).parents[1]


def test_known_variables_are_those_that_the_source_reads():
    texts = (p.read_text() for p in SOURCE.rglob("*.py") if p.name != "variables.py")
    read = {name for text in texts for name in re.findall(r'"(DYN_[A-Z0-9_]*[A-Z0-9])"', text)}

    assert read == process_setup.KNOWN


def test_unknown_variables_are_named_with_the_nearest_known_one():
    sentence = process_setup.describe_unknown(
        {"DYN_HTPP_PORT": "1", "DYN_XYZZY": "1", "DYN_HTTP_PORT": "1", "PATH": "/"}
    )

    assert "DYN_HTPP_PORT (did you mean DYN_HTTP_PORT?), DYN_XYZZY;" in sentence


def test_known_variables_are_not_named():
    environ = dict.fromkeys(process_setup.KNOWN, "1")

    assert process_setup.describe_unknown(environ) is None
