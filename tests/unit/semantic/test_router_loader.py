"""Reloading the configuration of the semantic router."""

import json
import os
import sys
import threading

import pytest

import semantic_configs
from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.semantic import service
from dynamo.semantic.classifiers import profile
from dynamo.testing import clock


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(semantic_configs.CONFIG)
    return path


def test_changed_file_takes_effect(path):
    loader = service.RouterLoader(path, clock.VirtualClock())
    path.write_text("default_model: other-model\n")

    assert loader.reload_if_changed()
    assert loader.router.settings.default_model == "other-model"


def test_changed_file_takes_effect_that_has_the_time_and_length_of_the_former(path):
    path.write_text("default_model: some-model\n")
    status = path.stat()
    loader = service.RouterLoader(path, clock.VirtualClock())
    path.write_text("default_model: next-model\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `rsync -t` sets it

    assert loader.reload_if_changed()
    assert loader.router.settings.default_model == "next-model"


def test_wrong_file_keeps_the_old_one_and_says_why(path):
    loader = service.RouterLoader(path, clock.VirtualClock())
    path.write_text("strategy: best\n")

    assert not loader.reload_if_changed()
    assert loader.router.settings.default_model == "general"
    assert "strategy" in loader.last_error


@pytest.mark.parametrize("data", ["", " \n"])
def test_emptied_file_keeps_the_guards(path, data):
    loader = service.RouterLoader(path, clock.VirtualClock())
    path.write_text(data)

    assert not loader.reload_if_changed()
    assert loader.router.settings.prompt_guard.enabled
    assert "empty file" in loader.last_error


def test_folder_that_cannot_be_is_logged_at_a_reload_and_ends_nothing(path, caplog):
    routing = service.RoutingService(path, metrics.Registry("llm"), clock.VirtualClock())
    path.write_text("semantic_cache: {enabled: true, directory: ~nobody-of-this-name/x}\n")

    assert routing.loader.reload_if_changed()
    assert "semantic_cache.directory: expected a path" in caplog.text


def test_folder_of_the_later_form_is_named_as_it_stands_in_the_file(path, tmp_path):
    tmp_path.joinpath("answers").touch()
    stores = f"{{response_cache: {{enabled: true, directory: {tmp_path}/answers}}}}"
    path.write_text(f"version: v0.3\nglobal: {{stores: {stores}}}\n")

    with pytest.raises(errors.ConfigError, match=r"^global\.stores\.response_cache\.directory: "):
        service.RoutingService(path, metrics.Registry("llm"), clock.VirtualClock())


def test_unchanged_file_is_not_read_again(path):
    assert not service.RouterLoader(path, clock.VirtualClock()).reload_if_changed()


def test_changed_file_of_tools_takes_effect(path):
    path.write_text(semantic_configs.CONFIG + "tools: {enabled: true, tools_db_path: tools.json}\n")
    database = path.with_name("tools.json")

    def write(*names):
        tools = [
            {"tool": {"function": {"name": name}}, "description": f"a tool {name}"}
            for name in names
        ]
        database.write_text(json.dumps(tools))

    write("mail")
    loader = service.RouterLoader(path, clock.VirtualClock())
    assert not loader.reload_if_changed()

    write("mail", "weather")
    assert loader.reload_if_changed()
    database.write_text("{")
    assert not loader.reload_if_changed()
    assert "tools.json" in loader.last_error
    assert [tool.name for tool in loader.router.loaded.tools] == ["mail", "weather"]

    write("news")
    assert loader.reload_if_changed()
    assert [tool.name for tool in loader.router.loaded.tools] == ["news"]


def test_request_that_no_model_can_serve_is_not_counted_as_unreadable(path):
    path.write_text("default_model: small\nmodel_config: {small: {context_length: 5}}\n")
    registry = metrics.Registry("llm")
    routing = service.RoutingService(path, registry, clock.VirtualClock())

    with pytest.raises(errors.InvalidRequest, match="small: the request needs some"):
        routing.route(semantic_configs.chat("a long text " * 5), {})

    refusals = registry.render().decode()
    assert 'llm_request_errors_total{model="none",reason="no_model"} 1.0' in refusals
    assert "parse_error" not in refusals


def test_wrong_first_file_stops_the_start(path):
    path.write_text("a list: [\n")

    with pytest.raises(errors.ConfigError, match="YAML"):
        service.RouterLoader(path, clock.VirtualClock())


async def test_changed_limits_of_conversations_take_effect(path):
    at = clock.VirtualClock()
    made = service.RouterLoader(path, at)
    path.write_text("conversations: {idle_seconds: 5, max_conversations: 1}\n")
    made.reload_if_changed()
    memory = made.router.conversations
    memory.remember(["a", "b"], "decision", "model")

    assert len(memory) == 1
    await at.advance(6)
    assert memory.previous_turn(["b"]) is None


def test_file_that_names_encoders_is_refused_where_the_process_has_none(path):
    routing = service.RoutingService(path, metrics.Registry("llm"), clock.VirtualClock())
    path.write_text("encoders: {profile: exact, base_model: models/x}\n")

    assert not routing.loader.reload_if_changed()
    assert "start it again" in routing.loader.last_error
    assert routing.router.settings.default_model == "general"


def test_notes_on_a_changed_file_are_logged(path, caplog):
    loader = service.RouterLoader(path, clock.VirtualClock())
    path.write_text("default_modle: m\n")
    loader.reload_if_changed()

    assert "default_modle: unknown key" in caplog.text


def test_request_is_routed_by_one_configuration_though_the_file_changes_meanwhile(path):
    loader = service.RouterLoader(path, clock.VirtualClock())

    class ReloadingClassifiers(profile.FastProfile):
        def classify_attack(self, text):
            """Be the event loop, while a thread routes."""
            path.write_text("default_model: other-model\n")
            loader.reload_if_changed()
            return super().classify_attack(text)

    body = semantic_configs.chat("some python")
    outcome = loader.router.route(body, {}, classifiers=ReloadingClassifiers())

    assert outcome.explanation.model == "coder"
    assert loader.router.settings.default_model == "other-model"


@pytest.mark.parametrize(("changed", "is_kept"), [("You guess.", False), ("You calculate.", True)])
def test_answer_by_a_former_configuration_is_not_cached_for_the_next(path, changed, is_kept):
    made = service.RoutingService(path, metrics.Registry("llm"), clock.VirtualClock())
    outcome = made.route(semantic_configs.chat(semantic_configs.SUM), {})
    path.write_text(semantic_configs.CONFIG.replace("You calculate.", changed) + "\n")
    assert made.loader.reload_if_changed()
    made.record_answer(outcome, semantic_configs.COMPLETION)

    assert len(made.router.cache) == is_kept


def test_answers_are_stored_while_a_thread_routes_a_large_body(path):
    path.write_text(
        semantic_configs.CONFIG.replace("max_entries: 3", "max_entries: 300, eviction_policy: lfu")
    )
    loader = service.RouterLoader(path, clock.VirtualClock())
    names = [f"Please solve this equation for me: {n} x = 11" for n in range(600)]
    keys = [loader.router.route(semantic_configs.chat(name), {}).cache_key for name in names]
    stored = loader.router.cache
    for key in keys[:300]:
        stored.store(key, semantic_configs.COMPLETION)
    is_over = threading.Event()

    def remove():  # as a header of a request asks
        while not is_over.is_set():
            for key in keys:
                stored.delete(key.name, "")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=remove)
    other.start()
    try:
        for key in keys * 3:
            stored.store(key, semantic_configs.COMPLETION)
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(interval)

    assert stored.num_bytes == sum(len(answer.body) for _, answer in stored.answers())


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_callers_behind_a_proxy_with_credentials_are_told_apart_by_their_keys(name):
    proxy = {"authorization": "Basic cHJveHk6"}
    tenants = [service.tenant_of({**proxy, name: key}) for key in ("ann", "bob")]

    assert tenants[0] != tenants[1]
    assert service.tenant_of({}) == ""
