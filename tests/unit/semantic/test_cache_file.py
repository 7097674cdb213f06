"""The file of a semantic cache: what outlives a restart, and what is refused."""

import contextlib
import dataclasses
import logging

import msgspec
import pytest

from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.semantic import cache, cache_file, config, request_view, service
from dynamo.testing import clock
from semantic_configs import COMPLETION, CONFIG, SUM, chat


@pytest.fixture
def at():
    return clock.VirtualClock()


@contextlib.contextmanager
def opened(directory, at, settings=None, origin=None):
    """Yield a cache that a file follows."""
    stored = cache.SemanticCache(settings or config.CacheSettings(), at)
    file = cache_file.CacheFile(directory, at)
    file.follow(stored, origin or cache_file.make_origin(config.SemanticConfig()))
    yield stored
    file.close()


def key_of(text, tenant=""):
    return cache.make_key(request_view.RequestView(chat(text)), {}, tenant)


def texts_in(stored, *texts):
    return [text for text in texts if stored.find(key_of(text), 0)]


def test_answers_outlive_a_restart_but_not_their_removal(tmp_path, at):
    with opened(tmp_path / "own", at) as stored:
        for text in ("first", "second", "third"):
            stored.store(key_of(text), COMPLETION)
        stored.remove(key_of("second").digest)
    with opened(tmp_path / "own", at) as stored:
        assert texts_in(stored, "first", "second", "third") == ["first", "third"]
        stored.invalidate()
    with opened(tmp_path / "own", at) as stored:
        assert len(stored) == 0


def test_answer_of_a_decision_is_its_own_after_a_restart(tmp_path, at):
    key = key_of("first")
    with opened(tmp_path / "own", at) as stored:
        stored.store(dataclasses.replace(key, decision="sums"), COMPLETION)
    with opened(tmp_path / "own", at) as stored:
        assert stored.find(dataclasses.replace(key, decision="sums"), 0)
        assert stored.find(key, 0) is None


async def test_time_runs_on_while_the_process_is_down(tmp_path, at):
    settings = config.CacheSettings(ttl_seconds=60)
    with opened(tmp_path / "own", at, settings) as stored:
        stored.store(key_of("old"), COMPLETION)
        await at.advance(40)
        stored.store(key_of("new"), COMPLETION)
    await at.advance(30)
    with opened(tmp_path / "own", at, settings) as stored:
        assert texts_in(stored, "old", "new") == ["new"]
        await at.advance(31)
        assert texts_in(stored, "new") == []


def test_only_this_user_may_enter_the_directory(tmp_path, at):
    with opened(tmp_path / "own", at) as stored:
        stored.store(key_of("first"), COMPLETION)
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "own").iterdir()}
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert modes == {0o600}
    (tmp_path / "own").chmod(0o750)
    with pytest.raises(errors.ConfigError, match="only user"):
        cache_file.CacheFile(tmp_path / "own", at)
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="semantic_cache"):
        cache_file.CacheFile(tmp_path / "file", at)


def test_second_process_gets_a_file_of_its_own(tmp_path, at):
    with opened(tmp_path / "own", at) as first, opened(tmp_path / "own", at) as second:
        first.store(key_of("first"), COMPLETION)
        second.store(key_of("second"), COMPLETION)

    with opened(tmp_path / "own", at) as first, opened(tmp_path / "own", at) as second:
        assert texts_in(first, "first", "second") == ["first"]
        assert texts_in(second, "first", "second") == ["second"]


@pytest.mark.parametrize("name", ["format", "configuration", "wordings"])
def test_answers_of_another_origin_are_refused_by_name(tmp_path, at, caplog, name):
    origin = cache_file.make_origin(config.SemanticConfig())
    with opened(tmp_path / "own", at, origin=origin) as stored:
        stored.store(key_of("first"), COMPLETION)
    with (
        caplog.at_level(logging.WARNING),
        opened(tmp_path / "own", at, origin=msgspec.structs.replace(origin, **{name: "x"})) as it,
    ):
        assert len(it) == 0
    assert f"are of another {name}" in caplog.text


def test_configurations_differ_by_their_models():
    other = config.SemanticConfig(bert_model=config.BertModel(model_id="other"))

    assert cache_file.make_origin(other) != cache_file.make_origin(config.SemanticConfig())


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_damaged_file_is_read_up_to_the_damage(tmp_path, at, damage):
    with opened(tmp_path / "own", at) as stored:
        stored.store(key_of("first"), COMPLETION)
        stored.store(key_of("second"), COMPLETION)
    path = tmp_path / "own" / "answers-0"
    data = path.read_bytes()
    changed = {
        "cut": data[:-5],
        "flip": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        "foreign": b"PK" + data,
        "empty": b"",
    }
    path.write_bytes(changed[damage])

    with opened(tmp_path / "own", at) as stored:
        left = texts_in(stored, "first", "second")
    assert left == (["first"] if damage in ("cut", "flip") else [])


def test_file_stays_within_its_bound(tmp_path, at):
    settings = config.CacheSettings(max_entries=2, max_megabytes=1)
    completion = msgspec.json.decode(COMPLETION)
    completion["choices"][0]["message"]["content"] = "x" * 400_000
    body = msgspec.json.encode(completion)
    with opened(tmp_path / "own", at, settings) as stored:
        for number in range(30):
            stored.store(key_of(f"question {number}"), body)
            assert (tmp_path / "own" / "answers-0").stat().st_size < 2**22
    with opened(tmp_path / "own", at, settings) as stored:
        assert texts_in(stored, "question 27", "question 28", "question 29") == [
            "question 28",
            "question 29",
        ]


def test_full_disk_ends_the_file_and_not_the_cache(tmp_path, at, caplog, monkeypatch):
    with opened(tmp_path / "own", at) as stored:
        stored.store(key_of("first"), COMPLETION)
        monkeypatch.setattr(cache_file.os, "write", _refuse)
        stored.store(key_of("second"), COMPLETION)
        assert texts_in(stored, "first", "second") == ["first", "second"]
    assert "No space left; answers are cached in memory only" in caplog.text
    assert not (tmp_path / "own" / "answers-0").exists()


def _refuse(descriptor, data):
    raise OSError("No space left")


def test_service_answers_from_the_file_after_a_restart(tmp_path, at):
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.replace("max_entries: 3", f"max_entries: 3, directory: {tmp_path}/own"))
    first = service.RoutingService(path, metrics.Registry("llm"), at)
    first.record_answer(first.route(chat(SUM), {}), COMPLETION)
    first.close()

    second = service.RoutingService(path, metrics.Registry("llm"), at)
    hit = second.route(chat(SUM), {})
    path.write_text(path.read_text().replace("max_entries: 3", "max_entries: 5"))
    second.loader.reload_if_changed()
    miss = second.route(chat(SUM), {})
    second.record_answer(miss, COMPLETION)
    second.close()

    assert hit.explanation.path == "cache"
    assert miss.explanation.path == "upstream"
    third = service.RoutingService(path, metrics.Registry("llm"), at)
    assert third.route(chat(SUM), {}).explanation.path == "cache"
    third.close()
