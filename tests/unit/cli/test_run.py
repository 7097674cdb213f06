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
        (["in=dyn://a.b.c", "out=echo_core"], {"source": "dyn://a.b.c", "target": "echo_core"}),
        (["in=http", "out=auto"], {"source": "http", "target": "auto"}),
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
        (["in=dyn://a"], "is no endpoint"),
        (["a", "b"], "'b' is one too many"),
        (["in=text", "in=http"], "'in=http' is one too many"),
    ],
)
def test_unknown_words_are_refused(words, message):
    with pytest.raises(errors.ConfigError, match=message):
        run.read_words(words)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("in=dyn://a.b.c", "m"), "dynamo.native --endpoint dyn://a.b.c --model m"),
        (
            ("in=dyn://a.b.c", "out=echo_core"),
            "dynamo.mocker --endpoint dyn://a.b.c --echo --tick-ms 10",
        ),
    ],
)
def test_endpoint_as_source_is_the_command_of_a_worker(words, flags):
    planned = run.plan(run.RunConfig(words=words))

    assert run.worker_command(planned)[1:] == ["-m", *flags.split()]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": ("in=dyn://a.b.c", "out=auto")}, "which out=auto is not"),
        ({"words": ("in=dyn://a.b.c", "out=echo_full")}, "expected an engine, or echo_core"),
        ({"words": ("in=dyn://a.b.c",), "decode": 2}, "expected one worker"),
    ],
)
def test_endpoint_as_source_refuses_what_is_no_single_worker(options, says):
    with pytest.raises(errors.ConfigError, match=says):
        run.worker_command(run.plan(run.RunConfig(**options)))
