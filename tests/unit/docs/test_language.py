"""What each measure of language finds."""

import pytest

import language

CODE = '''"""A module that somebody reads."""
# whose comment is this


class Limits:
    """A class."""

    def open(self, told, request):
        """It opens the stream of a request."""
        self.made = request

    def _once(self):
        """Of one call."""


class Other:
    """A class."""

    def run(self):
        return Limits()._once()
'''


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text(
        '"""Nothing to find."""\n\n\nclass Limits:\n    """A class."""\n'
    )
    return language.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "findings"),
    [
        ("vague bindings, %", ["a.py:8: told", "a.py:10: made"]),
        ("riddle words, per 1,000 lines", ["a.py:1: somebody", "a.py:2: # whose comment is this"]),
        ("repeated class names, %", ["a.py:5: Limits", "b.py:4: Limits"]),
        ("short docstrings, %", ["a.py:12: _once: Of one call."]),
        (
            "pronoun docstrings, %",
            ["a.py:8: open: It opens the stream of a request.", "a.py:12: _once: Of one call."],
        ),
        ("once-used helpers, %", ["a.py:12: _once"]),
    ],
)
def test_each_measure_names_what_it_finds_and_where(sources, name, findings):
    _, found = language.share(language.MEASURES[name], sources)

    assert found == findings


def test_a_share_is_of_all_that_could_be_found(sources):
    share, _ = language.share(language.MEASURES["repeated class names, %"], sources)

    assert share == pytest.approx(100 * 2 / 3)


def test_empty_tree_has_a_share_of_zero(tmp_path):
    for measure in language.MEASURES.values():
        assert language.share(measure, language.read(tmp_path)) == (0, [])
