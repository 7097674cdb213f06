"""docs/reference.md is up to date."""

from docs import generate


def test_reference_equals_what_the_code_generates():
    assert generate.TARGET.read_text() == generate.reference(), "run `make docs`"
