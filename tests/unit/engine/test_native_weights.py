"""Tensors are read by name and shape; a missing, different or unused one is an error that names it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dynamo.base import errors
from dynamo.engine.native import weights

A, B = torch.arange(6.0).view(2, 3), torch.ones(4)


def open_checkpoint(path, dtype=torch.float32):
    return weights.Checkpoint(path, dtype=dtype, device="cpu")


def save_shards(path, shards):
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_is_read(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("a", 2, 3), A)

        checkpoint.refuse_rest()


def test_shards_are_read(tmp_path):
    save_shards(tmp_path, {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("b", 4), B)
        assert torch.equal(checkpoint.take("a", 2, 3), A)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_types_are_converted_to_the_engines(tmp_path, stored):
    save_file({"a": A.to(stored)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, torch.bfloat16) as checkpoint:
        taken = checkpoint.take("a", 2, 3)

    assert torch.equal(taken, A.bfloat16())


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("z", (2, 3), "z is missing"),
        ("a", (3, 2), r"a is F32 \[2, 3\]; expected .* \[3, 2\]"),
        ("ids", (2,), "ids is I64"),
    ],
)
def test_a_tensor_of_unexpected_shape_or_type_is_named(tmp_path, name, shape, complaint):
    save_file({"a": A, "ids": torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(errors.ConfigError, match=complaint),
    ):
        checkpoint.take(name, *shape)


def test_an_unknown_tensor_is_named(tmp_path):
    save_file({"a": A, "extra.weight": B}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.take("a", 2, 3)
        with pytest.raises(errors.ConfigError, match=r"extra\.weight"):
            checkpoint.refuse_rest()


def test_derived_and_ignored_tensors_are_accepted(tmp_path):
    rest = {"model.layers.0.self_attn.rotary_emb.inv_freq": B, "lm_head.weight": A}
    save_file(rest, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.refuse_rest("lm_head.weight")


def test_a_directory_without_weights_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=str(tmp_path)), open_checkpoint(tmp_path):
        pass


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_bad_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(errors.ConfigError, match=r"index\.json"), open_checkpoint(tmp_path):
        pass


def test_a_broken_or_missing_file_is_named(tmp_path):
    save_shards(tmp_path, {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}})
    (tmp_path / "1.safetensors").write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(errors.ConfigError, match=r"1\.safetensors"), open_checkpoint(tmp_path):
        pass
    (tmp_path / "1.safetensors").unlink()

    with pytest.raises(errors.ConfigError, match=r"1\.safetensors"), open_checkpoint(tmp_path):
        pass
