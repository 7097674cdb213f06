"""Rules, operators and strategies of decisions."""

import msgspec
import pytest

from dynamo.semantic import config, decisions
from dynamo.semantic.classifiers import disguises, profile


def make_table(*rules, strategy="priority", **fields):
    """Return a table whose decisions have these rules, named a, b, …"""
    entries = [
        {"name": name, "rules": rule, "priority": 10 - number}
        for number, (name, rule) in enumerate(zip("abc", rules, strict=False))
    ]
    settings = {"decisions": entries, "strategy": strategy, **fields}
    return decisions.DecisionTable(msgspec.convert(settings, config.SemanticConfig))


def condition(kind, name):
    return {"type": kind, "name": name}


MATH = decisions.Signals(
    keyword_rule="code",
    domain_score=profile.DomainScore("math", 0.8, {"math": 0.8}),
    domain_names=frozenset({"math", "sums"}),
)
CODE, SUMS, LAW = (
    condition("keyword", "code"),
    condition("domain", "sums"),
    condition("domain", "law"),
)


@pytest.mark.parametrize(
    ("operator", "conditions", "applies"),
    [
        ("AND", [CODE, SUMS], True),
        ("AND", [CODE, LAW], False),
        ("OR", [LAW, SUMS], True),
        ("OR", [LAW], False),
        ("NOR", [LAW], True),
        ("NOR", [LAW, SUMS], False),
        ("AND", [], False),
        ("NOR", [], False),
    ],
)
def test_operator_joins_conditions(operator, conditions, applies):
    table = make_table({"operator": operator, "conditions": conditions})

    assert bool(table.matches(MATH)) == applies


def test_strategies_differ_in_the_first_decision():
    half, whole = {"operator": "OR", "conditions": [CODE, LAW]}, {"conditions": [SUMS]}

    by_priority = make_table(half, whole).matches(MATH)
    by_confidence = make_table(half, whole, strategy="confidence").matches(MATH)

    assert [match.settings.name for match in by_priority] == ["a", "b"]
    assert [match.settings.name for match in by_confidence] == ["b", "a"]
    assert [match.strength for match in by_priority] == [1.0, 0.8]


def test_configured_category_stands_for_those_of_the_classifier():
    categories = [{"name": "sums", "mmlu_categories": ["math", "physics"]}]
    table = make_table({"conditions": [SUMS]}, categories=categories)

    assert table.names_of("physics") == {"physics", "sums"}
    assert table.needs_domain


def test_category_with_an_underscore_is_the_one_with_a_blank():
    categories = [{"name": "computer_science", "mmlu_categories": ["computer_science"]}]
    table = make_table({"conditions": [SUMS]}, categories=categories)

    assert table.names_of("computer science") == {"computer science", "computer_science"}


def group(operator, *conditions):
    return {"operator": operator, "conditions": conditions}


@pytest.mark.parametrize(
    ("rule", "reasons"),
    [
        (group("AND", group("OR", CODE, LAW), group("NOT", LAW)), 2),
        (group("AND", SUMS, group("NOT", CODE)), None),
        (group("AND", SUMS, group("NOT", group("AND", CODE, LAW))), 2),
        (group("OR", group("AND", CODE, LAW), SUMS), 1),
        (group("NOT", group("OR", CODE, LAW)), None),
        (group("NOT", group("AND", CODE, LAW)), 1),
        (group("NOT", LAW), 1),
    ],
)
def test_conditions_inside_of_others_combine_by_their_operator(rule, reasons):
    matches = make_table(rule).matches(MATH)

    assert [len(match.reasons) for match in matches] == ([] if reasons is None else [reasons])


def test_strongest_signal_inside_of_others_counts():
    (match,) = make_table(group("AND", group("OR", SUMS, LAW), group("NOT", LAW))).matches(MATH)

    assert match.strength == 0.8
    assert match.reasons == ("OR (domain sums, domain law)", "NOT (domain law)")


def test_domain_inside_of_other_conditions_is_asked_for():
    assert make_table(group("AND", CODE, group("NOT", LAW))).needs_domain


def match_keywords(text, **rule):
    rules = [config.KeywordRule(name="r", **rule)]
    return decisions.KeywordMatcher(rules).match(text)


def test_keywords_match_whole_words_unless_they_end_in_signs():
    assert match_keywords("C++!", keywords=["c++"]) == "r"
    assert match_keywords("pythonic", keywords=["python"]) is None
    assert match_keywords("PYTHON", keywords=["python"]) == "r"
    assert match_keywords("PYTHON", keywords=["python"], case_sensitive=True) is None


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("\u8bf7\u89e3\u8fd9\u4e2a\u65b9\u7a0b", "\u65b9\u7a0b"),  # Chinese
        ("\u7528python\u5199\u4e00\u4e2a\u7a0b\u5e8f", "python"),
        ("\uc218\ud559\uc744", "\uc218\ud559"),  # Korean, with an ending
        (
            "\u0e42\u0e08\u0e17\u0e22\u0e4c\u0e04\u0e13\u0e34\u0e15",
            "\u0e04\u0e13\u0e34\u0e15",
        ),  # Thai
    ],
)
def test_keyword_is_found_where_a_script_sets_no_spaces(text, keyword):
    assert match_keywords(text, keywords=[keyword]) == "r"


@pytest.mark.parametrize(
    ("text", "keyword", "rule"),
    [
        ("the cafe\u0301 is open", "caf\u00e9", "r"),
        ("the caf\u00e9 is open", "cafe\u0301", "r"),
        ("the cafe\u0301 is open", "cafe", None),
    ],
)
def test_letter_and_its_accent_may_be_one_character_or_two(text, keyword, rule):
    assert match_keywords(text, keywords=[keyword]) == rule


def test_all_or_none_of_the_keywords_may_be_asked_for():
    assert match_keywords("a b", keywords=["a", "b"], operator="AND") == "r"
    assert match_keywords("a", keywords=["a", "b"], operator="AND") is None
    assert match_keywords("c", keywords=["a", "b"], operator="NOR") == "r"
    assert match_keywords("a", keywords=["a", "b"], operator="NOR") is None


def test_marks_without_end_are_not_brought_into_their_order(monkeypatch):
    """It takes a step for each two of them, in which nothing else runs."""
    given = []

    def normalize(form, text):
        given.append(text)
        return text

    rule = config.KeywordRule(name="r", keywords=["a"], operator="OR")
    matcher = decisions.KeywordMatcher([rule])
    monkeypatch.setattr("unicodedata.normalize", normalize)
    for marks in ("\u0315\u0301", "\u0301\uff9e", "\u0f73"):
        text = "a" + marks * 10_000

        matcher.match(text)
        disguises.fold(text)

    assert max(map(len, given)) < 100
