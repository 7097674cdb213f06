"""The last lines of the log."""

import logging

import msgspec

from dynamo.console.log_lines import MAX_LINES, LogRing
from dynamo.observability import logs


def emit(ring, message, level=logging.INFO):
    ring.handle(logging.LogRecord("dynamo.x", level, "f", 1, message, (), None))


def test_lines_are_numbered_and_carry_their_request():
    ring = LogRing()
    token = logs.log_context.set(logs.LogContext("http-request", "r1"))
    emit(ring, "first")
    logs.log_context.reset(token)
    emit(ring, "second", logging.ERROR)

    assert [(line.number, line.message, line.request_id) for line in ring.after()] == [
        (1, "first", "r1"), (2, "second", "")
    ]  # fmt: skip
    assert [line.message for line in ring.after(1)] == ["second"]
    assert [line.message for line in ring.after(least_level=logging.WARNING)] == ["second"]
    assert [line.message for line in ring.after(limit=1)] == ["second"]


def test_ring_and_its_lines_are_bounded():
    ring = LogRing()
    for _ in range(MAX_LINES + 5):
        emit(ring, "x" * 10_000)

    assert len(ring.after(limit=10**6)) == MAX_LINES
    assert len(ring.after()[0].message) == 2000


def test_line_with_wrong_arguments_is_kept_and_harms_nobody():
    ring = LogRing()
    ring.handle(logging.LogRecord("library", logging.INFO, "f", 1, "deprecated", (Warning,), None))

    assert [line.message for line in ring.after()] == ["deprecated"]


def test_line_about_an_exception_names_it():
    ring = LogRing()
    error = OSError("no space left")
    record = logging.LogRecord("dynamo.x", logging.ERROR, "f", 1, "it failed", (), None)
    record.exc_info = (OSError, error, None)
    ring.handle(record)

    assert [line.message for line in ring.after()] == ["it failed: OSError('no space left')"]


def test_line_with_half_a_surrogate_pair_can_be_sent():
    ring = LogRing()
    emit(ring, "cannot read caf\udce9.json")

    assert b"cannot read caf\\\\udce9.json" in msgspec.json.encode(ring.after())
