"""Windows of long texts, batches of windows, and spans of tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer_files
from dynamo.base import errors
from dynamo.preprocess import tokenizer_library
from dynamo.protocols import encoders
from dynamo.worker import classifier_set

WORDS = ["good", "bad", "ann", "lee", "##s", ","]


class Marks:
    """A network that calls a window an attack if it has the token of `bad`, and these tokens names."""

    def __init__(self, tokenizer, *, is_by_token=False):
        self._ids = {word: tokenizer.encode([word])[0][0][0] for word in ("bad", "ann", "lee")}
        self._is_by_token = is_by_token
        self.batches = []

    def __call__(self, windows):
        self.batches.append([len(window) for window in windows])
        if self._is_by_token:
            return {"": [[self._label(token) for token in window] for window in windows]}
        bad = self._ids["bad"]
        return {"": [[[0.1, 0.9] if bad in window else [0.8, 0.2]] for window in windows]}

    def _label(self, token):
        if token == self._ids["ann"]:
            return [0.1, 0.8, 0.1]
        return [0.1, 0.3, 0.6] if token == self._ids["lee"] else [1.0, 0.0, 0.0]


def make_set(*, is_by_token=False, window=100, **limits):
    tokenizer = tokenizer_library.OffsetTokenizer(tokenizer_files.wordpiece(WORDS))
    network = Marks(tokenizer, is_by_token=is_by_token)
    name = "pii" if is_by_token else "attack"
    labels = ("O", "B-PERSON", "I-PERSON") if is_by_token else ("benign", "jailbreak")
    loaded = classifier_set.LoadedClassifier(
        network=network,
        tokenizer=tokenizer,
        heads={name: classifier_set.LabelHead("", labels, is_by_token)},
        window=window,
    )
    limits = {"max_batch_tokens": 1000, "max_text_tokens": 100_000} | limits
    return classifier_set.ClassifierSet([loaded], **limits), network


def classify(classifiers, *texts):
    (name,) = classifiers.names
    return classifiers.classify([encoders.ClassifierInput(name, text) for text in texts])


@given(st.integers(0, 2000), st.integers(70, 600), st.integers(1, 64))
def test_windows_overlap_and_cover_a_text(num_tokens, size, overlap):
    windows = classifier_set.cut_windows(num_tokens, size, overlap)

    assert windows[0][0] == 0
    assert windows[-1][1] == num_tokens
    assert all(end - start <= size for start, end in windows)
    for (_, end), (start, _) in itertools.pairwise(windows):
        assert end - start >= min(overlap, size // 2)
    assert len({end - start for start, end in windows}) == 1


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(1, 500))
def test_batches_keep_the_order_and_the_bound(lengths, most):
    windows = [classifier_set.TextWindow(n, 0, length) for n, length in enumerate(lengths)]

    batches = list(classifier_set.split_batches(windows, most))

    assert [window for batch in batches for window in batch] == windows
    assert all(len(batch) == 1 or sum(w.end for w in batch) <= most for batch in batches)


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_an_attack_anywhere_in_a_long_text_is_found(place):
    classifiers, _ = make_set()
    words = ["good"] * 10_000
    words[place] = "bad"

    (found,) = classify(classifiers, " ".join(words))

    assert max(window[1] for window in found.windows) == 0.9
    assert found.is_complete


def test_texts_of_one_classifier_are_one_forward_pass():
    classifiers, network = make_set()

    classify(classifiers, "good", "bad good", "good good good")

    assert network.batches == [[3, 4, 5]]


def test_what_is_behind_the_limit_is_said_to_be_unread():
    classifiers, _ = make_set(max_text_tokens=50)

    (found,) = classify(classifiers, "good " * 60 + "bad")

    assert not found.is_complete
    assert max(window[1] for window in found.windows) == 0.2


def test_an_empty_text_has_one_window():
    classifiers, _ = make_set()

    assert len(classify(classifiers, "")[0].windows) == 1


def test_names_are_spans_of_characters():
    classifiers, _ = make_set(is_by_token=True)

    (found,) = classify(classifiers, "good ann lee, ann")

    assert [(s.label, s.start, s.end) for s in found.spans] == [
        ("PERSON", 5, 12),
        ("PERSON", 14, 17),
    ]
    assert found.spans[0].confidence == pytest.approx(0.9)


@given(st.integers(0, 399))
def test_a_name_at_the_edge_of_a_window_is_one_span(place):
    classifiers, _ = make_set(is_by_token=True, window=80)
    words = ["good"] * 400
    words[place : place + 2] = ["ann", "lee"]

    (found,) = classify(classifiers, " ".join(words))

    assert [(s.start, s.end) for s in found.spans] == [(5 * place, 5 * place + 7)]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"tokenizer\.json does not exist"):
        classifier_set.read_tokenizer(tmp_path)
