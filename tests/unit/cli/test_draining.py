"""The processes of `dynamo serve` may take as long to end as their own settings say."""

import pytest

from dynamo.base import config
from dynamo.cli import workers
from dynamo.frontend import config as frontend_config
from dynamo.worker import settings


@pytest.mark.parametrize(
    ("environ", "flags", "drain_s"),
    [
        ({}, {}, 30),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "120"}, {}, 120),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "0.5"}, {}, 5),
        ({"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "60"}, {}, 60),
        ({"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "7"}, {}, 37),
        ({}, {"worker_flags": "--max-num-seqs 4 --graceful-shutdown-timeout 90"}, 90),
        ({}, {"worker_flags": "--graceful-shutdown-timeout=90"}, 90),
        ({}, {"frontend_flags": "--http-graceful-shutdown-timeout-secs 80"}, 80),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "long"}, {}, 30),
    ],
)
def test_a_stop_takes_as_long_as_the_slowest_process_may(environ, flags, drain_s):
    assert workers.stop_timeout_s(environ, **flags) == drain_s + workers.STOP_MARGIN_S


@pytest.mark.parametrize(
    ("setting", "owner", "field"),
    [
        (workers.WORKER, settings.WorkerConfig, "graceful_shutdown_timeout_s"),
        (workers.GRACE, settings.WorkerConfig, "grace_period_s"),
        (
            workers.FRONTEND,
            frontend_config.FrontendConfig,
            "http_graceful_shutdown_timeout_secs",
        ),
        (workers.GRACE, frontend_config.FrontendConfig, "grace_period_s"),
    ],
)
def test_setting_is_that_of_the_process(setting, owner, field):
    by_flag = config.load(owner, prog="x", argv=[setting.flag, "77"], environ={})
    by_variable = config.load(owner, prog="x", argv=[], environ={setting.variable: "78"})
    loaded = (getattr(by_flag, field), getattr(by_variable, field), getattr(owner(), field))

    assert loaded == (77.0, 78.0, setting.default_s)
