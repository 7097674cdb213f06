"""The check of the installed vLLM; `test_startup` has the rest."""

import logging
import os

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import settings


def test_a_missing_vllm_names_its_extra_and_the_native_engine(monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        errors.ConfigError, match=r"make setup EXTRAS=vllm .*python -m dynamo.native"
    ):
        settings.check_vllm()


@pytest.mark.parametrize(("level", "told"), [(logging.DEBUG, "DEBUG"), (logging.INFO, None)])
def test_debug_logging_is_passed_on_to_vllm(monkeypatch, caplog, level, told):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setattr(settings.SupportedReleases, "check_installed", lambda self: None)
    with caplog.at_level(level, logger=settings.__name__):
        settings.check_vllm()
    heard = os.environ.pop("VLLM_LOGGING_LEVEL", None)

    assert heard == told
