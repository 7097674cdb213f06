import pytest

from dynamo.semantic.classifiers import pii, profile

FAST = profile.load_profile()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Please ask Jennifer Okonkwo about it", "Jennifer Okonkwo"),
        ("The invoice of David A. Kowalski is late", "David A. Kowalski"),
        ("call Margaret tomorrow", "Margaret"),
    ],
)
def test_name_is_found(text, name):
    (span,) = FAST.find_pii(text)[0]

    assert text[span.start : span.end] == name
    assert span.type == "PERSON"


def test_listed_name_stays_below_the_usual_threshold():
    (span,) = FAST.find_pii("Please ask Jennifer Okonkwo about it")[0]

    assert span.confidence == pii.SEVERAL_WORDS < 0.7


def test_announced_name_is_marked_once_and_with_confidence():
    (span,) = FAST.find_pii("my name is Jennifer Okonkwo")[0]

    assert span.confidence > 0.7


@pytest.mark.parametrize("text", ["Will the Mark be back in May?", "The Power Of Rose Gardens"])
def test_common_words_are_no_names(text):
    assert FAST.find_pii(text)[0] == []
