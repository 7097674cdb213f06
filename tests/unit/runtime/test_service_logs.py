"""The logs of a service that calls `configure_dynamo_logging`."""

import logging

import pytest

from dynamo.runtime.logging import configure_dynamo_logging

NAMES = ("", "dynamo", "watchfiles")


@pytest.fixture(autouse=True)
def _restored_loggers():
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in NAMES}
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_modules_of_the_service_log_at_the_level_of_dynamos(monkeypatch):
    monkeypatch.setenv("DYN_LOG", "info")
    configure_dynamo_logging()

    assert logging.getLogger("my_service").isEnabledFor(logging.INFO)
    assert not logging.getLogger("my_service").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize(("levels", "is_logged"), [("info", False), ("info,watchfiles=info", True)])
def test_watcher_of_discovery_logs_its_changes_only_where_it_is_named(
    monkeypatch, levels, is_logged
):
    monkeypatch.setenv("DYN_LOG", levels)
    configure_dynamo_logging()

    assert logging.getLogger("watchfiles.main").isEnabledFor(logging.INFO) is is_logged
