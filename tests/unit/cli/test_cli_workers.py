"""Which workers a command starts, and what it says of them."""

import contextlib
import functools

import pytest

from dynamo.base import clock, errors
from dynamo.cli import session, workers
from dynamo.cli.workers import Topology
from dynamo.worker import settings


def test_workers_of_one_kind_have_no_mode():
    assert Topology(num_answering=2).modes == {"worker 1": None, "worker 2": None}


def test_prefill_workers_come_before_decode_workers():
    modes = Topology(num_answering=2, num_prefill=1).modes

    assert list(modes.items()) == [
        ("prefill worker 1", "prefill"),
        ("decode worker 1", "decode"),
        ("decode worker 2", "decode"),
    ]


def test_topology_is_described_in_a_line():
    assert Topology().describe() == "aggregated: 1 worker, computing prompts and answers"
    assert Topology(num_answering=2, num_prefill=1).describe() == (
        "disaggregated: long prompts are computed by 1 prefill worker, answers by 2 decode workers"
    )


async def test_load_of_a_model_is_told(monkeypatch):
    described = []
    told = lambda describe: described.append(describe()) or contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(workers.waiting, "say_regularly", told)
    async with workers.join("mocker", settings.WorkerConfig(), Topology()):
        pass

    assert described == ["loading storyteller; Ctrl-C gives up"]


async def test_model_that_the_endpoint_does_not_serve_is_refused():
    worker = settings.WorkerConfig(model_name="first", model_alias=("org/first",))
    async with workers.join("mocker", worker, Topology()) as runtime:
        connect = functools.partial(
            session.connect, runtime, worker.endpoint_name, clock.SystemClock()
        )
        talk = await connect("org/first")
        with pytest.raises(errors.NoWorkers, match="generate serves first, not second"):
            await connect("second")

    assert talk.model == "first"
