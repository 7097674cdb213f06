"""Our flags and vLLM's, as the vLLM that is installed here reads them."""

import asyncio
import importlib.util
import pathlib
import warnings

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from dynamo.base import errors
from dynamo.engine.adapters.settings import VllmConfig
from dynamo.testing import clock
from dynamo.worker import model_source

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm_models
    from dynamo.engine.adapters.vllm import engine as adapter
    from dynamo.engine.adapters.vllm import versions

pytestmark = pytest.mark.filterwarnings("ignore")
NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
MODEL = model_source.built_in()  # vLLM looks whether it is there


def made(*flags, directory=MODEL, **settings):
    return adapter.engine_args(directory, VllmConfig(engine_args=flags, **settings), "some")


def test_vllms_own_flags_are_accepted_in_every_spelling():
    args = made(
        "--max-model-len", "1k", "--max_num_seqs=7", "-tp", "2", "--no-enable-prefix-caching"
    )

    assert (args.max_model_len, args.max_num_seqs, args.tensor_parallel_size) == (1000, 7, 2)
    assert args.enable_prefix_caching is False


def test_model_and_served_name_are_set():
    args = made()

    assert (args.model, args.served_model_name) == (str(MODEL), ["some"])


@pytest.mark.parametrize("flag", ["--served_model_name", "--model=x", "--config"])
def test_reserved_flags_of_vllm_are_refused(flag):
    with pytest.raises(errors.ConfigError, match=flag.partition("=")[0].replace("_", "-")):
        made(flag, "x")


def test_a_flag_that_nobody_knows_is_named():
    with pytest.raises(errors.ConfigError, match="--max-model-length"):
        made("--max-model-length", "5")


def test_sleep_mode_excludes_kv_export():
    assert made("--enable-sleep-mode").kv_transfer_config is None
    both = VllmConfig(engine_args=("--enable-sleep-mode", "--kv-transfer-config", NIXL))
    with pytest.raises(errors.ConfigError, match="--enable-sleep-mode: expected --connector none"):
        adapter.build(MODEL, both, "some")


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL")
def test_options_of_tiers_without_their_connector_are_warned_of(caplog):
    made(connector=("none",), kvbm_cpu_cache_gb="4")

    assert caplog.messages[-1].endswith("in --kvbm-storage-tiers: --kvbm-cpu-cache-gb")


def test_nixl_is_used_unless_the_connector_is_none():
    chosen = [made(connector=words).kv_transfer_config for words in (None, ("null",), ("none",))]

    assert [each and each.kv_connector for each in chosen] == ["NixlConnector"] * 2 + [None]


@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--kv_transfer"])
def test_connector_of_the_user_is_kept_however_its_flag_is_written(flag):
    offloading = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'

    assert made(flag, offloading).kv_transfer_config.kv_connector == "OffloadingConnector"
    with pytest.raises(errors.ConfigError, match="--connector and --kv-transfer-config"):
        made(flag, offloading, connector=("kvbm",))


def test_every_flag_of_this_vllm_is_passed_on_unless_it_would_have_no_effect():
    parser = versions.AsyncEngineArgs.add_cli_args(versions.FlexibleArgumentParser(add_help=False))
    flags = {word for action in parser._actions for word in action.option_strings}
    without_effect = {
        *("--tokenizer", "--tokenizer-revision", "--revision", "--download-dir"),
        *("--generation-config", "--override-generation-config"),
    }

    assert VllmConfig(engine_args=tuple(flags - without_effect)).engine_args
    for flag in without_effect:
        with pytest.raises(errors.ConfigError, match=f"{flag} would have no effect"):
            VllmConfig(engine_args=(flag, "x"))


def test_lora_modules_are_read_by_name_and_directory():
    read = adapter.lora_requests(VllmConfig(lora_modules=("poet=/a", "cook=/b")), is_enabled=True)

    assert [(one.lora_name, one.lora_path) for one in read.values()] == [
        ("poet", "/a"),
        ("cook", "/b"),
    ]
    assert len({one.lora_int_id for one in read.values()}) == 2


@pytest.mark.parametrize(
    ("modules", "is_enabled", "expected"),
    [
        (("poet",), True, "NAME=DIRECTORY"),
        (("poet=/a", "poet=/b"), True, "each name once"),
        (("poet=/a",), False, "--enable-lora"),
    ],
    ids=["without a directory", "twice", "without vLLM's flag"],
)
def test_invalid_lora_modules_are_refused(modules, is_enabled, expected):
    with pytest.raises(errors.ConfigError, match=expected):
        adapter.lora_requests(VllmConfig(lora_modules=modules), is_enabled=is_enabled)


def test_a_setting_that_does_not_fit_the_model_is_refused_before_loading(tmp_path):
    directory = vllm_models.make(tmp_path, context_length=512)
    with pytest.raises(errors.ConfigError, match="max_model_len"):
        versions.make_config(made("--max-model-len", "4096", directory=directory))


def test_unknown_model_is_refused_by_what_vllm_says_alone(tmp_path):
    directory = vllm_models.make(tmp_path)
    config = (directory / "config.json").read_text().replace('"qwen3"', '"foo"')
    (directory / "config.json").write_text(config)
    with pytest.raises(errors.ConfigError, match=r"^vLLM: The checkpoint .*`foo`") as caught:
        versions.make_config(made(directory=directory))

    assert "pydantic" not in str(caught.value)


class HoldingEngine:
    """An engine whose blocks are fetched by another engine after some attempts to clear them."""

    errored = False

    def __init__(self, num_refusals):
        self.options, self._num_refusals = [], num_refusals

    async def reset_prefix_cache(self, **options):
        self.options.append(options)
        if len(self.options) > self._num_refusals:
            return True
        if "reset_running_requests" in options:
            raise RuntimeError("Failed to reset KV cache")
        return False

    async def pause_generation(self, *, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)

    async def resume_generation(self):
        pass


class BusyEngine(HoldingEngine):
    """An engine that schedules ahead: a step is always under way, and holds its blocks, unless it is paused."""

    def __init__(self, time, step_s=0.02):
        super().__init__(0)
        self.is_paused, self._time, self._step_s = False, time, step_s

    async def pause_generation(self, *, mode, clear_cache):
        self.is_paused = True
        await self._time.sleep(self._step_s)

    async def resume_generation(self):
        self.is_paused = False

    async def reset_prefix_cache(self, **options):
        self.options.append(options)
        if "reset_running_requests" not in options:
            return False
        if not self.is_paused:
            raise RuntimeError("Failed to reset KV cache")
        return True


class RankedEngine(HoldingEngine):
    """An engine of several ranks, of which another than the first has running requests."""

    async def reset_prefix_cache(self, **options):
        self.options.append(options)
        return True


def clear(num_refusals, time, engine=None, flags=()):
    grammar_trials = adapter.grammars.make_trials(pathlib.Path("m"), ())
    library = adapter.VllmLibrary(made(*flags), {}, grammar_trials, time)
    library._llm = engine or HoldingEngine(num_refusals)
    return library._llm, asyncio.create_task(library.clear())


async def test_cache_is_cleared_once_held_blocks_are_free():
    time = clock.VirtualClock()
    engine, clearing = clear(3, time)
    await time.advance(0.25)
    is_early = clearing.done()
    await time.advance(0.1)  # it asks again after 0.1, 0.2, 0.4 ... 5 s
    await clearing

    assert not is_early
    assert [options.get("reset_running_requests") for options in engine.options] == [
        None,
        True,
        True,
        True,
    ]


async def test_cache_that_cannot_be_cleared_is_an_error():
    time = clock.VirtualClock()
    _, clearing = clear(99, time)
    await time.advance(adapter.HELD_S + 1)

    with pytest.raises(errors.EngineFailed, match="in use for 35 s"):
        await clearing


@pytest.mark.parametrize("step_s", [0.02, 1e9], ids=["soon", "while blocks are held"])
async def test_cache_of_an_engine_that_schedules_ahead_is_cleared_in_a_pause(step_s):
    time = clock.VirtualClock()
    engine, clearing = clear(0, time, BusyEngine(time, step_s))
    await time.advance(adapter.PAUSE_S)
    await clearing

    assert not engine.is_paused


async def test_engine_goes_on_when_its_clearing_is_given_up():
    time = clock.VirtualClock()
    engine, clearing = clear(0, time, BusyEngine(time))
    await time.advance(0.01)
    was_paused = engine.is_paused
    clearing.cancel()
    await asyncio.wait([clearing])

    assert was_paused
    assert not engine.is_paused


async def test_every_rank_is_made_to_clear_its_cache():
    time = clock.VirtualClock()
    engine, clearing = clear(0, time, RankedEngine(0), ("--data-parallel-size", "2"))
    await clearing

    assert [options.get("reset_running_requests") for options in engine.options] == [True]
