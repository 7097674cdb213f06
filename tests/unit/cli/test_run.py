"""What `dynamo run` is told."""

import pytest

from dynamo.base import errors
from dynamo.cli import run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["out=mocker"], {"target": "mocker"}),
        (["model", "in=batch:f.jsonl"], {"model": "model", "source": "batch:f.jsonl"}),
        (["in=text", "out=dyn://a.b.c"], {"source": "text", "target": "dyn://a.b.c"}),
        (["/models/a=b"], {"model": "/models/a=b"}),
    ],
)
def test_words_may_come_in_any_order(words, expected):
    assert run.read_words(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["in=telepathy"], "in=telepathy: expected one of text, stdin, batch:FILE, http"),
        (["in=batch:"], "in=batch:: expected one of text, stdin, batch:FILE, http"),
        (["out=warp"], "there are native, mocker"),
        (["out=dyn://a"], "is no endpoint"),
        (["a", "b"], "'b' is one too many"),
        (["in=text", "in=http"], "'in=http' is one too many"),
    ],
)
def test_unknown_words_are_refused(words, message):
    with pytest.raises(errors.ConfigError, match=message):
        run.read_words(words)
