import random
import string
import sys
import threading

import pytest

from dynamo.semantic.classifiers import entities, profile

FAST = profile.load_profile()
TAGGER = entities.EntityTagger(profile.WEIGHTS / "entities.npz")


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("Please ask Jennifer Okonkwo about it", "PERSON", "Jennifer Okonkwo"),
        ("The invoice of David A. Kowalski is late", "PERSON", "David A. Kowalski"),
        ("please call margaret tomorrow", "PERSON", "margaret"),
        ("my name is Jennifer Okonkwo", "PERSON", "Jennifer Okonkwo"),
        (
            "Send it to 47 Via Nazario Sauro, Apt. 12",
            "STREET_ADDRESS",
            "47 Via Nazario Sauro, Apt. 12",
        ),
    ],
)
def test_name_or_address_is_found_at_the_usual_threshold(text, kind, found):
    (span,) = FAST.find_pii(text)[0]

    assert (span.type, text[span.start : span.end]) == (kind, found)
    assert span.confidence >= 0.7


@pytest.mark.parametrize(
    "text",
    [
        "Will the Mark be back in May?",
        "haskell",
        "The Power Of Rose Gardens",
        "Solve x^2 = 4 for x",
        "Explain Kant's categorical imperative",
        "WHAT IS THE CAPITAL OF FRANCE",
        "",
        "\n\n \n",
        # parts of longer numbers, no postcodes
        "arXiv:2103.00020",
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    ],
)
def test_common_words_are_no_names(text):
    assert FAST.find_pii(text)[0] == []


def test_spans_are_the_same_in_a_long_text():
    text = "Please ask Jennifer Okonkwo about it. "
    filler = "the harvest was good , " * 2000

    alone = [(span.start, span.end) for span in TAGGER.find(text)]
    within = [(span.start, span.end) for span in TAGGER.find(filler + text + filler)]

    assert within == [(start + len(filler), end + len(filler)) for start, end in alone]


def test_memory_of_known_tokens_is_bounded():
    unknown = " ".join(
        f"Q{number:b}".replace("0", "a").replace("1", "b") for number in range(40_000)
    )

    list(TAGGER.find(unknown))

    assert [span.type for span in TAGGER.find("Please ask Jennifer Okonkwo")] == ["PERSON"]


def test_texts_are_tagged_alike_while_a_thread_reads_a_large_one():
    draw = random.Random(1)

    def word():
        return "".join(draw.choices(string.ascii_lowercase, k=7)).capitalize()

    texts = [
        f"Please send it to Anita {word()}, who lives at {number} {word()} Street in {word()}."
        for number in range(300)
    ]
    large = " ".join(word() for _ in range(20_000))
    alone, shared = (entities.EntityTagger(profile.WEIGHTS / "entities.npz") for _ in range(2))
    expected = [list(alone.find(text)) for text in texts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    reader = threading.Thread(target=lambda: list(shared.find(large)))
    reader.start()
    try:
        found = [list(shared.find(text)) for text in texts]
    finally:
        reader.join()
        sys.setswitchinterval(interval)

    assert found == expected
    assert [list(shared.find(text)) for text in texts] == expected


def test_products_are_too_small_for_threads():
    """OpenBLAS starts threads above 2^18 multiplications, which would cost ten times as much for a request."""
    _, _, width, num_hidden = TAGGER._hidden.shape

    assert entities._BLOCK * width * num_hidden <= 2**18
