"""Decoder configurations: both spellings are read, and unsupported settings are refused by name."""

import json
import os
import subprocess
import sys

import pytest

from dynamo.base import errors
from dynamo.engine.native import config, rope
from waiting import PATIENT_S

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}


def test_the_models_shape_is_read():
    parsed = config.parse(LLAMA)

    assert (parsed.num_layers, parsed.num_heads, parsed.num_kv_heads) == (2, 4, 2)
    assert (parsed.head_dim, parsed.max_context, parsed.norm_eps) == (16, 2048, 1e-5)
    assert (parsed.dtype, parsed.is_tied) == ("bfloat16", False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA, (False, False, False, False)),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_families_differ_in_biases_and_norms(fields, expected):
    parsed = config.parse(fields)

    found = parsed.has_qkv_bias, parsed.has_output_bias, parsed.has_mlp_bias, parsed.has_qk_norm
    assert found == expected


def test_head_dim_may_differ_from_hidden_size_by_heads():
    assert config.parse(QWEN3).head_dim == 32


def test_model_type_stands_in_for_a_missing_architecture():
    fields = {k: v for k, v in QWEN3.items() if k != "architectures"}

    assert config.parse(fields).family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_experts"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok 9 is more than 8 experts",
        ),
        ({"num_experts": 8}, "num_experts"),
        (
            {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "use_sliding_window": True,
                "sliding_window": 1024,
                "max_window_layers": 2,
            },
            "sliding-window",
        ),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 60}, "head_dim"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, named):
    with pytest.raises(errors.ConfigError, match=named):
        config.parse(LLAMA | changes)


@pytest.mark.parametrize(
    "changes", [{"architectures": ["GPT2LMHeadModel"]}, {"hidden_act": "relu"}]
)
def test_a_refusal_lists_the_supported_models(changes):
    with pytest.raises(errors.ConfigError) as refusal:
        config.parse(LLAMA | changes)

    assert all(name in str(refusal.value) for name in (*config.FAMILIES, *rope.SCALINGS))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 1024},
        {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 2},
        {"layer_types": ["full_attention", "full_attention"]},
        {"sliding_window": None},
        {"quantization_config": None},
    ],
)
def test_unsupported_features_that_are_switched_off_are_accepted(changes):
    assert config.parse(QWEN2 | changes).num_layers == 2


def test_both_spellings_of_the_rope_configuration_are_read():
    scaling = {"type": "linear", "factor": 2.0}
    old = config.parse(LLAMA | {"rope_scaling": scaling}).rope
    fields = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    new = config.parse(fields | {"rope_parameters": parameters}).rope

    assert old.frequencies().tolist() == new.frequencies().tolist()


def test_spellings_of_the_rope_configuration_that_differ_are_refused():
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    added = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

    with pytest.raises(errors.ConfigError, match=r"rope_parameters and rope_scaling .* rope_type"):
        config.parse(LLAMA | {"rope_parameters": parameters, "rope_scaling": added})


def test_spellings_of_the_rope_configuration_that_agree_are_read():
    scaling = {"type": "linear", "factor": 2.0}
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 40000.0}

    parsed = config.parse(LLAMA | {"rope_parameters": parameters, "rope_scaling": scaling}).rope

    assert (parsed.scaling, parsed.parameters["factor"], parsed.theta) == ("linear", 2.0, 40000.0)


def test_yarn_stretches_the_context():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

    assert config.parse(QWEN2 | {"rope_scaling": yarn}).max_context == 8192
    stretched = QWEN2 | {"rope_scaling": yarn, "max_position_embeddings": 8192}
    assert config.parse(stretched).max_context == 8192


def test_a_directory_without_configuration_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=str(tmp_path)):
        config.read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps(LLAMA | {"hidden_act": "gelu"})])
def test_a_bad_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        config.read(tmp_path)


def test_configuration_is_utf_8_whatever_the_locale(tmp_path):
    fields = LLAMA | {"_name_or_path": "modèle"}
    (tmp_path / "config.json").write_text(json.dumps(fields, ensure_ascii=False), "utf-8")
    program = "import pathlib, sys; from dynamo.engine.native import config; config.read(pathlib.Path(sys.argv[1]))"
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
