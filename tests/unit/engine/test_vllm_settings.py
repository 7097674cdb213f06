"""The check of the installed vLLM; `test_startup` has the rest."""

import logging
import os
import sys

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


@pytest.mark.parametrize(
    "flag", ["--router-mode", "--http-port", "--max-model-length", "--no-such=3", "--tp_sizes"]
)
def test_flag_that_no_supported_vllm_has_is_refused_before_its_import(flag):
    with pytest.raises(errors.ConfigError, match=f"{flag.partition('=')[0].replace('_', '-')} "):
        settings.VllmConfig(engine_args=("--dtype", "float32", flag, "x"))

    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--port", "8000"), "the frontend has --http-port"),
        (("--tool_call_parser=hermes",), "here it is --dyn-tool-call-parser"),
        (("--chat-template", "own.jinja"), "here it is --custom-jinja-template"),
        (("--enable-auto-tool-choice",), "leave it out"),
        (("/models/qwen3", "--seed", "1"), "a model is given as --model /models/qwen3"),
    ],
)
def test_command_line_of_vllm_serve_is_refused_with_what_to_write_here(words, hint):
    with pytest.raises(errors.ConfigError, match=hint):
        settings.VllmConfig(engine_args=words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--revision", "v1.1"), "--revision .* give its directory as --model"),
        (("--tokenizer=/models/other",), "--tokenizer .* frontends read the tokenizer"),
        (("--override_generation_config", '{"temperature": 0.5}'), "generation_config.json"),
        (("--override-generation-config.temperature=0.5",), "generation_config.json"),
        (("--generation-config", "vllm"), "generation_config.json"),
        (("--download-dir", "/models"), "HF_HOME"),
    ],
)
def test_flag_of_vllm_that_would_have_no_effect_is_refused(words, hint):
    with pytest.raises(errors.ConfigError, match=hint):
        settings.VllmConfig(engine_args=("--dtype", "float32", *words))


def test_flags_of_vllm_are_passed_on_in_every_spelling():
    words = ("-tp", "2", "--max_num_seqs=7", "--no-enable-prefix-caching", "--max-num-batched", "9")
    words += ("--compilation-config.mode", "0", "--seed", "-1", "-O3")

    assert settings.VllmConfig(engine_args=words).engine_args == words


def test_unknown_flag_is_left_to_a_vllm_that_is_newer_than_known(monkeypatch):
    monkeypatch.setattr(settings.SupportedReleases, "installed_version", "0.99.0")

    assert settings.VllmConfig(engine_args=("--brand-new",)).engine_args == ("--brand-new",)
