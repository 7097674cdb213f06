"""Options of NVIDIA Dynamo's processes: taken where they change no answer, and refused by their reason elsewhere."""

import dataclasses
import importlib
import logging

import pytest

from dynamo.base import config, errors, foreign_options
from dynamo.frontend import config as frontend_config
from dynamo.router import __main__ as router_command
from dynamo.router import config as router_config
from dynamo.worker import engines, settings


class MugConfig:
    """A class of options for tests, in place of the real ones."""


OPTIONS = {
    "MugConfig": {
        "--steam": foreign_options.ForeignOption("switch *", "it is hot"),
        "--lid": foreign_options.ForeignOption("switch off", "bring one"),
        "--colour": foreign_options.ForeignOption("value white red", "it has two colours"),
        "--print": foreign_options.ForeignOption("value *", "it is plain"),
        "--ais-*": foreign_options.ForeignOption("value *", "it is not simulated"),
    },
    "Other": {"--handle": foreign_options.ForeignOption("switch *", "it has one")},
}


@pytest.fixture(autouse=True)
def _table(monkeypatch):
    monkeypatch.setattr(foreign_options, "read_table", lambda: OPTIONS)


@pytest.mark.parametrize(
    ("line", "remaining", "notes"),
    [
        ("--steam --mine", "--mine", ["--steam has no effect here: it is hot"]),
        ("--no-steam x", "x", ["--no-steam has no effect here: it is hot"]),
        ("--steam true x", "x", ["--steam true has no effect here: it is hot"]),
        ("--lid false", "", ["--lid false has no effect here: bring one"]),
        ("--no-lid", "", ["--no-lid has no effect here: bring one"]),
        ("--colour red y", "y", ["--colour red has no effect here: it has two colours"]),
        ("--print=--a", "", ["--print=--a has no effect here: it is plain"]),
        ("--print -1 y", "y", ["--print -1 has no effect here: it is plain"]),
        ("--ais-size 2", "", ["--ais-size 2 has no effect here: it is not simulated"]),
        ("--no-colour --handle", "--no-colour --handle", []),
    ],
)
def test_option_without_effect_is_taken_and_logged(line, remaining, notes, caplog):
    assert foreign_options.take(line.split(), [MugConfig]) == remaining.split()
    assert caplog.messages == notes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lid", "--lid is not supported here: bring one"),
        ("--lid=1", "--lid=1 is not supported here: bring one"),
        ("--colour blue", "--colour blue is not supported here: it has two colours"),
        ("--print", "--print: expected a value"),
        ("--print --steam", "--print: expected a value"),
    ],
)
def test_option_that_would_change_more_is_refused_by_its_reason(line, message):
    with pytest.raises(errors.ConfigError) as error:
        foreign_options.take(line.split(), [MugConfig])

    assert str(error.value) == message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CupConfig(MugConfig):
    """A class with an option of its own."""

    size: int = config.option(1, help="how large")


def test_command_takes_the_foreign_options_of_its_classes(caplog):
    argv = ["--print", "x", "--size", "2", "--steam"]
    loaded = config.load(CupConfig, prog="cup", argv=argv, environ={})

    assert loaded.size == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_unknown_option_is_still_named():
    with pytest.raises(errors.ConfigError, match="unrecognized argument: --handle"):
        config.load(CupConfig, prog="cup", argv=["--steam", "--handle"], environ={})


def test_tables_are_of_classes_that_do_not_have_their_options(monkeypatch):
    monkeypatch.undo()
    table = foreign_options.read_table()
    modules = (
        importlib.import_module(f"dynamo.{name}")
        for name in (
            "runtime.component",
            "frontend.config",
            "router.config",
            "router.__main__",
            "worker.settings",
            "engine.adapters.settings",
            "engine.mock.settings",
        )
    )
    classes = {name: cls for module in modules for name, cls in vars(module).items()}

    for name, options in table.items():
        fields = dataclasses.fields(classes[name])
        ours = {
            flag
            for f in fields
            for flag in ("--" + f.name.replace("_", "-"), *f.metadata.get("aliases", ()))
        }
        assert not ours & options.keys()
        for option in options.values():
            assert option.form.split()[0] in ("switch", "value")
            assert not option.reason.endswith(".")


LAUNCH_LINES = [
    ("frontend", "--router-mode kv --router-reset-states --http-port 8000"),
    ("frontend", "--store-kv file --enable-anthropic-api --dyn-chat-processor vllm"),
    ("frontend", "--router-mode kv --no-router-track-active-blocks --router-event-threads 4"),
    ("frontend", "--router-mode kv --router-block-size 64 --router-prefill-load-scale 2"),
    ("router", "--endpoint dynamo.prefill.generate --block-size 64 --no-track-active-blocks"),
    ("vllm", "--model m --enable-multimodal --sleep-mode-level 1 --enable-prefix-caching"),
    ("vllm", "--model m --dyn-endpoint-types chat,completions --enable-local-indexer true"),
    (
        "vllm",
        "--model m --dyn-default-thinking-mode disabled --store-kv mem --disable-log-requests",
    ),
    ("sglang", "--model-path m --use-sglang-tokenizer --page-size 16"),
    ("trtllm", "--model-path m --modality text --publish-events-and-metrics --max-beam-width 1"),
    ("mocker", "--model-path m --engine-type sglang --bootstrap-ports 50100 --dp-size 2"),
]


@pytest.mark.parametrize(("name", "line"), LAUNCH_LINES)
def test_launch_line_of_the_original_starts_our_process(name, line, monkeypatch):
    monkeypatch.undo()
    parts_by_name = {
        "frontend": (frontend_config.FrontendConfig, router_config.RoutingConfig),
        "router": (router_command.RouterServiceConfig, router_command.ServiceRoutingConfig),
    }
    parts = parts_by_name.get(name) or (settings.WorkerConfig, engines.settings_of(name))
    loaded = config.load_parts(parts, prog=name, argv=line.split(), environ={})

    words = getattr(loaded[-1], "engine_args", ())
    assert {*words} <= {"--enable-prefix-caching", "--page-size", "16"}
