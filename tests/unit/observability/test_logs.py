"""Levels of modules, and the two formats of log lines."""

import errno
import io
import json
import logging
import os
import pathlib
import time

import jsonschema
import pytest

from dynamo.base import errors
from dynamo.observability import logs
from dynamo.protocols import trace_context

SCHEMA = json.loads(
    (pathlib.Path(__file__).parents[3] / "docs" / "log-line.schema.json").read_text()
)


@pytest.fixture(autouse=True)
def _restore_logging():
    names = ("dynamo", "dynamo.runtime", "dynamo.frontend")
    root, levels = logging.getLogger(), {n: logging.getLogger(n).level for n in names}
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def written(environ: dict[str, str], *records: tuple[str, int, str]) -> str:
    stream = io.StringIO()
    logs.configure(environ, stream)
    for name, level, message in records:
        logging.getLogger(name).log(level, message)
    return stream.getvalue()


def test_module_has_a_level_of_its_own():
    text = written(
        {"DYN_LOG": "warn,dynamo.runtime=debug"},
        ("dynamo.runtime.backends.tcp", logging.DEBUG, "heard"),
        ("dynamo.frontend.app", logging.INFO, "not heard"),
    )

    assert "heard" in text
    assert "not heard" not in text


def test_level_off_logs_nothing():
    assert written({"DYN_LOG": "off"}, ("dynamo.frontend.app", logging.CRITICAL, "x")) == ""


def test_other_libraries_log_warnings_only():
    text = written(
        {"DYN_LOG": "debug"}, ("asyncio", logging.INFO, "no"), ("asyncio", logging.WARNING, "yes")
    )

    assert text.count("\n") == 1
    assert "yes" in text


def test_json_line_has_the_fields_of_the_original():
    line = written({"DYN_LOGGING_JSONL": "1"}, ("dynamo.worker.host", logging.INFO, "ready"))
    row = json.loads(line)

    assert (row["level"], row["target"], row["message"]) == ("INFO", "dynamo.worker.host", "ready")
    assert row["time"].endswith("Z")


def test_json_line_with_a_name_of_a_file_that_is_no_text_is_written():
    name = os.fsdecode(b"caf\xe9.json")
    line = written({"DYN_LOGGING_JSONL": "1"}, ("dynamo.x", logging.WARNING, f"{name}: é"))
    row = json.loads(line)

    assert row["message"] == "caf\\udce9.json: é"
    assert isinstance(row["line"], int)


def test_json_lines_follow_the_schema_of_the_documents():
    stream = io.StringIO()
    logs.configure({"DYN_LOGGING_JSONL": "1", "DYN_LOG": "debug"}, stream)
    speaker = logging.getLogger("dynamo.worker.host")
    for level in (logging.DEBUG, logging.WARNING, logging.CRITICAL):
        speaker.log(level, "said")
    trace = trace_context.TraceContext(trace_id="0a" * 16, span_id="0b" * 8)
    token = logs.log_context.set(logs.LogContext("http-request", "mine", trace))
    try:
        int("broken")
    except ValueError:
        speaker.exception("it failed")
    finally:
        logs.log_context.reset(token)
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    for row in rows:
        jsonschema.validate(row, SCHEMA)

    assert rows[-1].keys() == SCHEMA["properties"].keys()


def test_error_includes_its_traceback():
    stream = io.StringIO()
    logs.configure({}, stream)
    try:
        int("broken")
    except ValueError:
        logging.getLogger("dynamo.worker.host").exception("it failed")

    assert "Traceback" in stream.getvalue()
    assert "ValueError: invalid literal" in stream.getvalue()


def test_error_of_a_peers_text_begins_no_line_of_its_own():
    stream = io.StringIO()
    logs.configure({}, stream)
    error = ValueError("\x1b[2J\n2026-01-01 INFO forged")
    logging.getLogger("dynamo.worker.host").error("it failed", exc_info=error)
    text = stream.getvalue()

    assert "\x1b" not in text
    assert "\n    2026-01-01 INFO forged" in text


def test_unknown_level_is_a_config_error_that_lists_the_levels():
    with pytest.raises(errors.ConfigError, match=r"expected levels out of .*got 'loud'"):
        logs.parse_levels("loud")


def test_line_carries_id_and_trace_of_its_request():
    trace = trace_context.TraceContext("a" * 32, "b" * 16)
    token = logs.log_context.set(logs.LogContext("http-request", "mine", trace))
    try:
        line = written({"DYN_LOGGING_JSONL": "1"}, ("dynamo.frontend", logging.INFO, "x"))
        text = written({}, ("dynamo.frontend", logging.INFO, "x"))
    finally:
        logs.log_context.reset(token)
    row = json.loads(line)

    assert (row["trace_id"], row["span_id"]) == ("a" * 32, "b" * 16)
    assert (row["x_request_id"], row["span_name"]) == ("mine", "http-request")
    assert "x_request_id=mine" in text


def test_variable_overrides_levels_of_the_file(tmp_path):
    path = tmp_path / "logging.toml"
    path.write_text('log_level = "error"\n[log_filters]\n"dynamo::runtime" = "debug"\n')
    environ = {"DYN_LOGGING_CONFIG_PATH": str(path)}
    records = (
        ("dynamo.runtime", logging.DEBUG, "one"),
        ("dynamo.frontend", logging.WARNING, "two"),
    )

    assert written(environ, *records).count("\n") == 1
    assert "two" in written(environ | {"DYN_LOG": "info"}, *records)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "expected a TOML file"),
        ("log_level = ", "expected a TOML file"),
        ('log_level = "loud"', "expected levels out of .* got 'loud'"),
        ("log_level = 3", "expected levels out of .* got 3"),
        ('log_filters = "x"', "expected log_filters to be a table"),
        ('level = "info"', "expected log_level and log_filters, got 'level'"),
    ],
)
def test_malformed_file_is_a_config_error_of_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "logging.toml"
    if content is not None:
        path.write_text(content)

    with pytest.raises(errors.ConfigError, match=sentence):
        logs.configure({"DYN_LOGGING_CONFIG_PATH": str(path)}, io.StringIO())


def test_connections_without_a_file_are_one_sentence_a_second():
    now, stream = [0.0], io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(logs.FileLimitFilter(lambda: now[0]))
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    error = OSError(errno.EMFILE, "Too many open files")
    for now[0] in (5.0, 5.5, 5.9, 6.0):
        logger.error("socket.accept() out of system resource", exc_info=error)
    logger.error("another", exc_info=OSError(errno.EPERM, "not permitted"))
    logger.removeHandler(handler)
    lines = stream.getvalue().splitlines()

    sentence = "connections wait: [Errno 24] Too many open files; raise the limit (ulimit -n, LimitNOFILE=)"
    assert lines[:3] == [sentence, sentence, "another"]
    assert lines[-1].endswith("not permitted")


def test_times_are_local_on_request(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        line = written({"DYN_LOG_USE_LOCAL_TZ": "1"}, ("dynamo", logging.INFO, "x"))
    finally:
        monkeypatch.undo()
        time.tzset()

    assert line.partition(" ")[0].endswith("+09:00")


def peer_log(caplog):
    """A log of peers and the function that moves its clock."""
    now = [0.0]
    log = logs.PeerLog(logging.getLogger("dynamo.test"), lambda: now[0])

    def say(second, peer="10.0.0.1"):
        now[0] = second
        caplog.clear()
        log.warning(peer, "came at %s", second)
        return [record.getMessage() for record in caplog.records]

    return say


def test_each_peer_has_one_line_a_second(caplog):
    say = peer_log(caplog)

    assert say(0.0) == ["came at 0.0"]
    assert say(0.5) == []
    assert say(0.5, "10.0.0.2") == ["came at 0.5"]
    assert say(0.99) == []
    assert say(1.0) == ["came at 1.0 (2 lines like this were left out)"]
    assert say(3.0) == ["came at 3.0"]


def test_many_peers_at_once_take_bounded_memory(caplog):
    say = peer_log(caplog)
    lines = sum(len(say(0.0, f"10.0.{n >> 8}.{n & 255}")) for n in range(5000))

    assert lines == 1025


def test_message_with_control_characters_stays_one_entry():
    text = written({}, ("dynamo.x", logging.WARNING, "a peer\n2026-01-01 INFO forged\x1b[2J\rgone"))

    assert text.count("\n2") == 0
    assert "\x1b" not in text
    assert "\r" not in text


def test_unknown_variables_are_one_warning_at_start():
    text = written({"DYN_HTPP_PORT": "1", "DYN_XYZZY": "2"})

    assert text.count("WARN") == 1
    assert "DYN_HTPP_PORT (did you mean DYN_HTTP_PORT?)" in text


def test_request_id_with_control_characters_speaks_to_no_terminal():
    token = logs.log_context.set(logs.LogContext("http-request", "a\x9b2J\x1b[2J\nforged"))
    try:
        text = written({}, ("dynamo.frontend", logging.INFO, "path /\x9b31m"))
    finally:
        logs.log_context.reset(token)

    assert not {"\x9b", "\x1b"} & set(text)
    assert "\nforged" not in text


def test_process_whose_standard_error_is_closed_logs_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    logs.configure({})

    logging.getLogger("dynamo").warning("unheard")
