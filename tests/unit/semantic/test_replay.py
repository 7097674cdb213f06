import gzip

import msgspec
import pytest

import semantic_configs
from dynamo.base import config, errors
from dynamo.cli import semantic as command
from dynamo.semantic import replay

SECRET = "my-secret-plan"
REQUESTS = (
    f"Write python code for {SECRET}",
    semantic_configs.SUM,
    "How are you?",
    semantic_configs.ATTACK,
)
NEW_CONFIG = semantic_configs.CONFIG.replace("[python,", "[cobol,").replace(
    "threshold: 0.7", "mode: observe"
)


@pytest.fixture
def trace(tmp_path):
    """Return a file with rows of an audit log, a plain request, and two lines that are none."""
    rows = [
        {"request_id": f"r{n}", "request": msgspec.json.decode(semantic_configs.chat(text))}
        for n, text in enumerate(REQUESTS)
    ]
    lines = [msgspec.json.encode(row) for row in rows]
    lines += [semantic_configs.chat("How is it?"), b"{broken", b"[1]"]
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n\n")
    return path


def compare(path, old=semantic_configs.CONFIG):
    new = semantic_configs.make_router(NEW_CONFIG)
    return replay.compare(
        replay.read_requests(path), new, semantic_configs.make_router(old) if old else None
    )


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed", "/v2/rerank", "/v1/score"])
def test_recorded_request_for_vectors_is_not_replayed(trace, path):
    """A forced audit has them; no frontend routes them."""
    row = {"path": path, "request": {"model": "auto", "input": "Write python code"}}
    trace.write_bytes(msgspec.json.encode(row))

    assert (compare(trace).num_requests, compare(trace).num_skipped) == (0, 1)


@pytest.mark.parametrize(
    ("path", "field", "expected"),
    [
        ("/v1/completions", "prompt", "off"),
        ("/api/generate", "prompt", "on"),
        ("/v1/responses", "input", "on"),
        ("/invocations", "prompt", "off"),
        ("/v1/rare", "input", "off"),
        (None, "input", "on"),
    ],
)
def test_reasoning_is_that_of_the_recorded_api(trace, path, field, expected):
    row = {"path": path, "request": {"model": "auto", field: "Write cobol code"}}
    trace.write_bytes(msgspec.json.encode(row))

    report = compare(trace, semantic_configs.CONFIG)

    assert report.changes["reasoning: off -> on"] == (expected == "on")


def test_changed_requests_are_counted_and_named(trace):
    report = compare(trace)

    assert (report.num_requests, report.num_changed, report.num_skipped) == (5, 2, 2)
    assert report.changes["model: coder -> general"] == 1
    assert report.changes["path: blocked -> upstream"] == 1
    assert [line.partition(":")[0] for line in report.examples] == ["r0", "r3"]


def test_same_configuration_changes_nothing(trace):
    assert compare(trace, NEW_CONFIG).num_changed == 0


def test_report_holds_no_text(trace):
    assert SECRET not in "\n".join(compare(trace).lines())


def test_without_an_old_configuration_the_destinations_are_counted(trace):
    report = compare(trace, None)

    assert report.num_changed == 0
    assert report.models == {"general": 4, "mathy": 1}


def test_gzipped_log_is_read(trace, tmp_path):
    path = tmp_path / "audit.jsonl.gz"
    path.write_bytes(gzip.compress(trace.read_bytes()))

    assert compare(path).num_requests == 5


def test_damaged_gzipped_log_is_named(tmp_path):
    path = tmp_path / "audit.jsonl.gz"
    damaged = bytearray(gzip.compress(b"".join(b'{"a":%d}\n' % number for number in range(4000))))
    damaged[20:40] = b"\xff" * 20
    path.write_bytes(damaged)

    with pytest.raises(errors.ConfigError, match=r"audit\.jsonl\.gz"):
        list(replay.read_requests(path))


def test_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"away\.jsonl"):
        compare(tmp_path / "away.jsonl")


def test_command_prints_what_changes(trace, tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(semantic_configs.CONFIG)
    new.write_text(NEW_CONFIG)
    argv = ["replay", str(trace), "--semantic-router", str(old), "--config", str(new)]
    options = config.load(command.SemanticCommandConfig, prog="dynamo semantic", argv=argv)

    assert command.run(options) == 0

    assert "5 requests, 2 change" in capsys.readouterr().out


def test_command_asks_for_the_new_configuration(trace):
    options = command.SemanticCommandConfig(action="replay", subject=str(trace))

    with pytest.raises(errors.ConfigError, match="--config"):
        command.run(options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"action": "explain", "new_config": "c"}, "--config: has no effect with explain"),
        ({"action": "check", "new_config": "c"}, "--config: has no effect with check"),
        ({"action": "replay", "model": "m"}, "--model: has no effect with replay"),
    ],
)
def test_option_of_another_action_is_refused(options, says):
    with pytest.raises(errors.ConfigError, match=says):
        command.run(command.SemanticCommandConfig(subject="s", **options))
