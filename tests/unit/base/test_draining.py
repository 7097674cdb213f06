"""What starts processes waits as long as their own settings let them drain."""

import pytest

from dynamo.base import draining

WORKER = ("python", "-m", "dynamo.native", "--model", "m")
FRONTEND = ("python", "-m", "dynamo.frontend", "--http-port", "1")
PLANNER = ("python", "-m", "dynamo.planner", "--backend", "mocker")


@pytest.mark.parametrize(
    ("environ", "argv", "drain_s"),
    [
        ({}, WORKER, 30),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "120"}, WORKER, 120),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "0.5"}, WORKER, 0.5),
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "long"}, WORKER, 30),
        ({"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "7"}, WORKER, 37),
        ({}, (*WORKER, "--max-num-seqs", "4", "--graceful-shutdown-timeout", "90"), 90),
        ({}, (*WORKER, "--graceful-shutdown-timeout=90"), 90),
        ({}, (*WORKER, "--graceful-shutdown-timeout", "90", "--graceful-shutdown-timeout=80"), 80),
        ({}, (*WORKER, "--graceful-shutdown-timeout"), 30),  # which the worker refuses
        ({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "120"}, FRONTEND, 5),
        ({"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "60"}, FRONTEND, 60),
        ({}, (*FRONTEND, "--http-graceful-shutdown-timeout-secs", "80"), 80),
        ({}, ("python", "-m", "dynamo.sdk", "m:C", "--graceful-shutdown-grace-period", "9"), 39),
        ({}, (), 30),
    ],
)
def test_process_may_take_as_long_as_its_last_setting_says(environ, argv, drain_s):
    assert draining.stop_timeout_s(argv, environ) == drain_s + draining.STOP_MARGIN_S


@pytest.mark.parametrize(
    ("flags", "drain_s"),
    [
        ((), 30),
        (("--worker-flags", ""), 30),
        (("--worker-flags", "--max-num-seqs=4 --graceful-shutdown-timeout=90"), 90),
        (("--worker-flags=--graceful-shutdown-timeout 90",), 90),
        (("--worker-flags", "--graceful-shutdown-timeout 90", "--worker-flags", ""), 30),
        (("--worker-flags", "--graceful-shutdown-timeout '90"), 30),  # which the planner refuses
    ],
)
def test_planner_may_take_longer_than_its_workers(flags, drain_s):
    assert draining.stop_timeout_s((*PLANNER, *flags), {}) == drain_s + 2 * draining.STOP_MARGIN_S


@pytest.mark.parametrize(
    ("content", "environ", "flags", "drain_s"),
    [
        ("graceful_shutdown_timeout = 120", {}, (), 120),
        ("graceful_shutdown_timeout_s = 120\ngrace_period_s = 7.5", {}, (), 127.5),
        ('{"graceful_shutdown_grace_period": "7"}', {}, (), 37),
        ("graceful_shutdown_timeout = 120", {}, ("--graceful-shutdown-timeout", "90"), 90),
        (
            "graceful_shutdown_timeout = 120",
            {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "60"},
            (),
            60,
        ),
        ("graceful_shutdown_timeout = [120]", {}, (), 30),  # which the worker refuses
        ("no TOML", {}, (), 30),
    ],
)
def test_process_may_take_as_long_as_its_file_says(tmp_path, content, environ, flags, drain_s):
    (tmp_path / "options").write_text(content)
    argv = (*WORKER, "--config", "options", *flags)

    timeout_s = draining.stop_timeout_s(argv, environ, str(tmp_path))

    assert timeout_s == drain_s + draining.STOP_MARGIN_S


def test_process_may_take_as_long_as_its_json_says():
    argv = (*FRONTEND, '--config={"http_graceful_shutdown_timeout_secs": 80}')

    assert draining.stop_timeout_s(argv, {}) == 80 + draining.STOP_MARGIN_S
    assert draining.stop_timeout_s((*argv, "--config", "/no/such/file"), {}) == 10


def test_planner_takes_the_flags_of_its_workers_from_its_file_too():
    file = '{"worker_flags": "--graceful-shutdown-timeout 90"}'

    timeout_s = draining.stop_timeout_s((*PLANNER, "--config", file), {})

    assert timeout_s == 90 + 2 * draining.STOP_MARGIN_S
