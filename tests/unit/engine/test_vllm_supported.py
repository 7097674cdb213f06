"""Which vLLM is taken: `test_installed` has the rest."""

import logging
import os

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import installed
from dynamo.engine.adapters.vllm import supported


def test_without_vllm_both_ways_out_are_named(monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        errors.ConfigError, match=r"make setup EXTRAS=vllm .*python -m dynamo.native"
    ):
        supported.check()


@pytest.mark.parametrize(("level", "told"), [(logging.DEBUG, "DEBUG"), (logging.INFO, None)])
def test_vllm_logs_as_much_as_we_do(monkeypatch, caplog, level, told):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setattr(installed.Wanted, "check", lambda self: None)
    with caplog.at_level(level, logger=supported.__name__):
        supported.check()
    heard = os.environ.pop("VLLM_LOGGING_LEVEL", None)

    assert heard == told
