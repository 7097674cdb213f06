"""The supported releases of a library."""

import pytest

from dynamo.base import config, errors
from dynamo.engine.adapters import settings

RELEASES = settings.SupportedReleases(
    name="Lib", package="lib", install_hint="make setup EXTRAS=lib", oldest=(0, 28), newest=(0, 32)
)


@pytest.mark.parametrize(
    ("releases", "extra"),
    [(RELEASES, "lib"), (settings.SGLANG, "sglang"), (settings.TENSORRT_LLM, "trtllm")],
)
def test_a_missing_library_names_its_extra_and_the_native_engine(releases, extra, monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=rf"make setup EXTRAS={extra}.*dynamo\.native"):
        releases.check_installed()


@pytest.mark.parametrize("version", ["0.27.1", "0.8.5.post2"])
def test_an_old_release_is_refused_with_the_supported_range(version):
    with pytest.raises(errors.ConfigError, match=r"too old: expected 0\.28 to 0\.32"):
        RELEASES.check_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.32.1+cpu"])
def test_supported_releases_are_accepted_without_a_warning(version, caplog):
    RELEASES.check_version(version)

    assert not caplog.records


@pytest.mark.parametrize("version", ["0.33.0", "1.0", "dev"])
def test_unknown_releases_are_accepted_with_a_warning(version, caplog):
    RELEASES.check_version(version)

    assert version in caplog.text


def test_the_installed_distribution_is_checked(monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        settings.importlib.metadata, "packages_distributions", lambda: {"lib": ["lib-cpu"]}
    )
    monkeypatch.setattr(settings.importlib.metadata, "version", {"lib-cpu": "0.1"}.__getitem__)
    with pytest.raises(errors.ConfigError, match=r"Lib 0\.1 is too old"):
        RELEASES.check_installed()


OBJECT = '{"name": "poet", "path": "/a", "base_model_name": "m"}'


@pytest.mark.parametrize(
    "words",
    [["poet=/a", "cook=/b"], ["poet=/a,cook=/b"], [OBJECT, '{"name": "cook", "path": "/b"}']],
)
def test_adapters_are_given_as_vllm_takes_them(words):
    argv = ["--enable-lora", "--lora-modules", *words, "--max-lora-rank", "16"]
    read = config.load(settings.VllmConfig, prog="worker", argv=argv, environ={})

    assert settings.read_lora_modules(read.lora_modules) == [("poet", "/a"), ("cook", "/b")]
    assert read.engine_args == ("--enable-lora", "--max-lora-rank", "16")


@pytest.mark.parametrize(
    "module", ["poet", "=/a", "poet=", '{"name": "poet"}', "{poet=/a}", '{"name": 1}']
)
def test_module_without_name_or_directory_is_refused(module):
    with pytest.raises(errors.ConfigError, match="expected NAME=DIRECTORY"):
        settings.read_lora_modules(module.split(","))


def test_second_served_name_is_refused_with_the_flag_for_it():
    with pytest.raises(
        errors.ConfigError, match=r"unexpected argument: other; .* as --model-alias"
    ):
        settings.VllmConfig(engine_args=("other",))
