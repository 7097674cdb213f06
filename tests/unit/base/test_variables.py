"""Variables that look like ours and are not known are named."""

import ast
import pathlib
import re

import dynamo.base
from dynamo.base import process_setup

SOURCE = pathlib.Path(dynamo.base.__file__).parents[1]


def variables_of_settings(text):
    """The variables of the fields that are declared by `setting`, which names them after the field."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.rpartition(".")[2] == "setting":
                yield f"DYN_{ast.unparse(node.target).upper()}"


def test_known_variables_are_those_that_the_source_reads():
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'"(DYN_[A-Z0-9_]*[A-Z0-9])"', text)}
    read |= {name for text in texts if "setting(" in text for name in variables_of_settings(text)}

    assert read == process_setup.KNOWN


def test_unknown_variables_are_named_with_the_nearest_known_one():
    sentence = process_setup.describe_unknown(
        {"DYN_HTPP_PORT": "1", "DYN_XYZZY": "1", "DYN_HTTP_PORT": "1", "PATH": "/"}
    )

    assert "DYN_HTPP_PORT (did you mean DYN_HTTP_PORT?), DYN_XYZZY;" in sentence


def test_known_variables_are_not_named():
    environ = dict.fromkeys(process_setup.KNOWN, "1")

    assert process_setup.describe_unknown(environ) is None
