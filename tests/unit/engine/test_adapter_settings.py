"""The supported releases of a library."""

import pytest

from dynamo.base import errors
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
