"""What the simulated engine can be told, and what it refuses."""

import json

import pytest

from dynamo.base import config, errors
from dynamo.engine.mock.settings import MockConfig, merge_extra_args


def from_file(tmp_path, content, **settings):
    path = tmp_path / "extra.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return merge_extra_args(MockConfig(extra_engine_args=str(path), **settings))


def test_extra_args_file_overrides_and_accepts_earlier_names(tmp_path):
    made = from_file(
        tmp_path, {"num_gpu_blocks": 8, "dp_size": 2, "speedup_ratio": 10}, block_size=32
    )

    assert (made.num_gpu_blocks_override, made.data_parallel_size) == (8, 2)
    assert (made.speedup_ratio, made.block_size) == (10.0, 32)


def test_settings_without_a_file_are_unchanged():
    assert merge_extra_args(MockConfig()) == MockConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"blocks": 8}, "unknown key 'blocks'; expected one of block_size, "),
        ({"block_size": "many"}, "Expected `int`, got `str`"),
        ({"preemption_mode": "random"}, "Invalid enum value 'random'"),
        ({"num_workers": 0}, "num_workers: expected 1 to 4096, got 0"),
        ({"dp_size": 0}, "data_parallel_size: expected 1 to 1024, got 0"),
        ({"kvbm_host_bandwidth": 0}, "kvbm_host_bandwidth: expected at least 0.001, got 0.0"),
        ([1], "expected a JSON object"),
        ("{", "expected a readable JSON file"),
    ],
)
def test_invalid_file_is_refused_by_its_name(tmp_path, content, message):
    with pytest.raises(errors.ConfigError, match=f"extra.json: .*{message}"):
        from_file(tmp_path, content)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="No such file"):
        merge_extra_args(MockConfig(extra_engine_args=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 100}, "100 is less than --max-num-seqs 256"),
        ({"block_size": 0}, "--block-size: expected at least 1, got 0"),
        ({"speedup_ratio": -1.0}, "--speedup-ratio: expected 0 or more, got -1.0"),
        ({"tick_ms": float("nan")}, "--tick-ms: expected 0 or more, got nan"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 9000},
            "--max-model-len 9000 is more than --max-num-batched-tokens 8192",
        ),
    ],
)
def test_contradicting_settings_are_refused(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        MockConfig(**settings).check()


def test_dynamos_mocker_flags_are_accepted():
    argv = (
        "--no-enable-prefix-caching --no-enable-chunked-prefill --preemption-mode fifo"
        " --data-parallel-size 2 --num-workers 3 --startup-time 1.5 --decode-speedup-ratio 2"
    )

    made = config.load(MockConfig, prog="mocker", argv=argv.split(), environ={})

    assert (made.enable_prefix_caching, made.enable_chunked_prefill) == (False, False)
    assert (made.preemption_mode, made.data_parallel_size, made.num_workers) == ("fifo", 2, 3)
    assert (made.startup_time, made.decode_speedup_ratio) == (1.5, 2.0)
