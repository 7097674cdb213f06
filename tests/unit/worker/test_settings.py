"""What a worker is told."""

import pytest

from dynamo.base import config, errors
from dynamo.protocols import instances
from dynamo.worker import health, settings


def load(*argv, **environ):
    return config.load(settings.WorkerConfig, prog="worker", argv=argv, environ=environ)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ((), {}, ("dynamo", "backend", "generate")),
        ((), {"DYN_NAMESPACE": "prod"}, ("prod", "backend", "generate")),
        (("--endpoint", "dyn://a.b.c"), {"DYN_NAMESPACE": "prod"}, ("a", "b", "c")),
    ],
)
def test_endpoint_follows_from_role_and_flags(argv, environ, expected):
    assert load(*argv, **environ).endpoint_name == instances.EndpointName(*expected)


def test_malformed_endpoint_is_refused():
    with pytest.raises(errors.ConfigError, match="expected dyn://namespace"):
        _ = load("--endpoint", "b.c").endpoint_name


def test_health_check_is_off_by_default():
    wanted = load(DYN_HEALTH_CHECK_ENABLED="true", DYN_CANARY_WAIT_TIME="5")

    assert load().health_check is None
    assert wanted.health_check == health.HealthCheck(wait_s=5.0, answer_s=3.0)


def test_default_thinking_mode_sets_the_switches_of_the_chat_template():
    told = load(
        "--default-chat-template-kwargs", '{"thinking": true}', DYN_DEFAULT_THINKING_MODE="disabled"
    )

    assert told.template_defaults == {"enable_thinking": False, "thinking": True}
    assert load().template_defaults == {}


def test_flags_of_other_servers_are_aliases():
    told = load("--model-path", "/m", "--served-model-name", "n")

    assert (told.model, told.model_name) == ("/m", "n")


@pytest.mark.parametrize(
    ("argv", "role", "noted"),
    [
        (("--max-local-prefill-length", "9"), "decode", []),
        (("--max-local-prefill-length", "9"), "prefill", ["--max-local-prefill-length"]),
        (("--prefill-queue", "queue"), "prefill", []),
        (
            ("--prefill-queue", "queue", "--prefill-timeout-s", "3"),
            "agg",
            ["--prefill-timeout-s", "--prefill-queue"],
        ),
        (("--disagg-policy", "estimated"), "embed", ["--disagg-policy"]),
        (("--is-prefill-worker",), "embed", ["--is-prefill-worker"]),
        (("--disaggregation-mode", "agg"), "agg", []),
        (("--kv-peer-prefixes", "--health-check-enabled"), "embed", ["--kv-peer", "--health"]),
        ((), "embed", []),
    ],
)
def test_flag_that_has_no_effect_on_a_worker_is_noted(argv, role, noted):
    notes = load(*argv).find_notes(role)

    assert len(notes) == bool(noted)
    for flag in noted:
        assert flag in notes[0]
    assert all("no effect on a worker that" in note for note in notes)


@pytest.mark.parametrize("flag", ["--dyn-tool-call-parser", "--dyn-reasoning-parser"])
def test_unknown_parser_is_refused_with_the_known_parsers(flag):
    load(flag, "none").check()

    with pytest.raises(errors.ConfigError, match=f"{flag}: expected one of .*granite.*'zzz'"):
        load(flag, "zzz").check()


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, "None"),
        ({"DYN_SYSTEM_PORT": "-1"}, "None"),
        ({"DYN_SYSTEM_ENABLED": "true"}, "9090"),
        ({"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_PORT": "8081"}, "8081"),
        ({"DYN_SYSTEM_PORT": "0"}, "0"),
        ({"DYN_SYSTEM_PORT": "8081-8089"}, "8081-8089"),
        ({"DYN_SYSTEM_ENABLED": "false", "DYN_SYSTEM_PORT": "8081"}, "None"),
    ],
)
def test_system_port_is_served_as_enabled(environ, port):
    worker = config.load(settings.WorkerConfig, prog="x", argv=[], environ=environ)

    assert str(worker.used_system_port) == port


def test_variables_of_a_deployment_by_an_operator_are_honoured():
    environ = {
        "DYN_SYSTEM_ENABLED": "true",
        "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    }
    worker = config.load(settings.WorkerConfig, prog="x", argv=[], environ=environ)

    assert str(worker.used_system_port) == "9090"
    assert worker.system_use_endpoint_health_status == ("generate",)
