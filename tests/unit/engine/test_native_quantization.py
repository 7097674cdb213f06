"""Quantized checkpoints give the logits of their expanded weights, and what cannot be computed is refused by name."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_native_runner import chunk, expected_logits, make_runner, make_sequence

from checkpoints import make_checkpoint
from dynamo.base import errors
from dynamo.engine.native import config, quantization, weights

FILE = "model.safetensors"
ROWS, WIDTH = 8, 64


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the projections of a checkpoint are stored."""

    stored_as: str
    bits: int
    group_size: int = 16  # columns; 0: one group
    is_symmetric: bool = True
    has_order: bool = False  # the columns of a group do not follow one another
    has_one_scale: bool = False

    @property
    def fields(self):
        if self.stored_as.startswith("gptq"):
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group_size or -1,
                "desc_act": self.has_order,
                "sym": self.is_symmetric,
                "checkpoint_format": self.stored_as,
            }
        kept = {"num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric}
        kept["strategy"] = "group" if self.group_size else "channel"
        return {
            "quant_method": "compressed-tensors",
            "format": self.stored_as,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": kept}},
            "ignore": ["lm_head"],
        }

    def draw(self, rows, width):
        """Random integers with scales, zero points and groups, and the weights that they stand for."""
        num_groups = width // self.group_size if self.group_size else 1
        middle = 2 ** (self.bits - 1)
        values = torch.randint(2**self.bits, (rows, width))
        scales = ((torch.rand(rows, num_groups) + 0.5) * 0.3 / middle).half()
        if self.has_one_scale:
            scales = scales[:1, :1].expand(rows, num_groups)
        zeros = torch.full((rows, num_groups), middle)
        if not self.is_symmetric:
            zeros += torch.randint(-3, 4, zeros.shape)
        groups = torch.arange(width) * num_groups // width
        if self.has_order:
            groups = groups[torch.randperm(width)]
        plain = (values - zeros[:, groups]).half() * scales[:, groups]
        return values, scales, zeros, groups, plain

    def stored(self, rows, width):
        """The tensors of a projection by suffix, and its weights as floats."""
        values, scales, zeros, groups, plain = self.draw(rows, width)
        if self.stored_as.startswith("gptq"):
            offset = 1 if self.stored_as == "gptq" else 0
            tensors = {
                "qweight": pack(values, self.bits).T,
                "qzeros": pack(zeros.T - offset, self.bits),
                "scales": scales.T,
                "g_idx": groups.int(),
                "bias": torch.zeros(rows),
            }
            return tensors, plain
        tensors = {"weight_scale": scales[:1, 0] if self.has_one_scale else scales}
        middle = 2 ** (self.bits - 1)
        if self.stored_as == "int-quantized":
            tensors["weight"] = (values - middle).to(torch.int8)
            zeros = (zeros - middle).to(torch.int8)
        else:
            tensors["weight_packed"] = pack(values, self.bits)
            tensors["weight_shape"] = torch.tensor([rows, width])
            zeros = pack(zeros.T, self.bits).T
        if not self.is_symmetric:
            tensors["weight_zero_point"] = zeros
        if self.has_order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, plain


def pack(values, bits):
    """Rows of unsigned values in 32-bit words, the first in the lowest bits; the last word may have room."""
    places = 2 ** (bits * torch.arange(32 // bits))
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % len(places)))
    return (padded.view(len(values), -1, len(places)) * places).sum(-1).to(torch.int32)


def quantize(directory, scheme, family):
    """Write a checkpoint whose projections are quantized, and return that of the same weights as floats."""
    quantized, plain = directory / "quantized", directory / "plain"
    for path in (quantized, plain):
        make_checkpoint(path, family)
    tensors = load_file(plain / FILE)
    stored = dict(tensors)
    for name in tensors:
        if name.endswith("proj.weight"):
            parts, floats = scheme.stored(*tensors[name].shape)
            tensors[name] = floats.float()
            del stored[name]
            prefix = name.removesuffix("weight")
            stored = {prefix + part: tensor.contiguous() for part, tensor in parts.items()} | stored
    save_file(tensors, plain / FILE, {"format": "pt"})
    save_file(stored, quantized / FILE, {"format": "pt"})
    fields = json.loads((quantized / "config.json").read_text())
    fields["quantization_config"] = scheme.fields
    (quantized / "config.json").write_text(json.dumps(fields))
    return quantized, plain


SCHEMES = {
    "4 bits in words": ("qwen3", Scheme(stored_as="pack-quantized", bits=4)),
    "4 bits in words, ordered, with zero points": (
        "qwen2",
        Scheme(stored_as="pack-quantized", bits=4, is_symmetric=False, has_order=True),
    ),
    "8 bits in words, one scale": (
        "llama",
        Scheme(stored_as="pack-quantized", bits=8, group_size=0, has_one_scale=True),
    ),
    "8 bits of experts": ("qwen3_moe", Scheme(stored_as="int-quantized", bits=8, group_size=0)),
    "8 bits with zero points": (
        "llama",
        Scheme(stored_as="int-quantized", bits=8, is_symmetric=False),
    ),
    "GPTQ in 4 bits": ("llama", Scheme(stored_as="gptq", bits=4)),
    "GPTQ in 4 bits of experts, ordered": (
        "qwen3_moe",
        Scheme(stored_as="gptq", bits=4, has_order=True),
    ),
    "GPTQ in 8 bits, second format": (
        "qwen3",
        Scheme(stored_as="gptq_v2", bits=8, is_symmetric=False),
    ),
}


@pytest.mark.reference
@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_expanded_weights(tmp_path, name):
    family, scheme = SCHEMES[name]
    quantized, plain = quantize(tmp_path, scheme, family)
    sequence = make_sequence(40)
    (logits,) = make_runner(quantized).logits([chunk(sequence, 0, 40)])

    torch.testing.assert_close(logits, expected_logits(plain, sequence)[-1], rtol=1e-4, atol=2e-4)


def take(tmp_path, parts, zero_offset=0):
    tensors = {f"x.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
    save_file(tensors, tmp_path / FILE)
    with weights.Checkpoint(tmp_path, dtype=torch.float32, device="cpu") as checkpoint:
        checkpoint.add_prefix("model.")
        checkpoint.gptq_zero_offset = zero_offset
        matrix = checkpoint.take_matrix("model.x", ROWS, WIDTH)
        checkpoint.refuse_rest()
        return matrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [5, 7, 8, 9])
def test_last_word_of_a_row_may_have_room(bits, number):
    values = torch.randint(2**bits, (3, number))
    unpacked, num_bits = quantization._unpack(pack(values, bits), number)

    assert torch.equal(unpacked.long(), values)
    assert num_bits == bits


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_point_of_zero_borrows_from_its_neighbour_in_gptqs_first_format(tmp_path, bits):
    parts, _ = Scheme(stored_as="gptq", bits=bits).stored(ROWS, WIDTH)
    zeros = torch.arange(ROWS).expand(4, ROWS) % 3  # every third one is 0
    less_one = pack(zeros, bits) - pack(torch.ones_like(zeros), bits)

    found = take(tmp_path, parts | {"qzeros": less_one}, zero_offset=1)
    expected = take(tmp_path, parts | {"qzeros": pack(zeros, bits)})

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("stored_as", "name", "group_id"),
    [("gptq_v2", "g_idx", 0), ("pack-quantized", "weight_g_idx", -1)],
)
def test_groups_that_were_never_filled_in_are_runs_of_columns(tmp_path, stored_as, name, group_id):
    parts, plain = Scheme(stored_as=stored_as, bits=4).stored(ROWS, WIDTH)

    found = take(tmp_path, parts | {name: torch.full((WIDTH,), group_id).int()})

    assert torch.equal(found, plain.float())


def test_bias_of_zeros_changes_nothing_and_another_is_refused(tmp_path):
    parts, plain = Scheme(stored_as="gptq_v2", bits=4).stored(ROWS, WIDTH)

    assert torch.equal(take(tmp_path, parts), plain.float())
    with pytest.raises(errors.ConfigError, match=r"1 tensors are of no known use, as model\.x\.b"):
        take(tmp_path, parts | {"bias": torch.ones(ROWS)})


@pytest.mark.parametrize(
    ("stored_as", "changes", "named"),
    [
        ("pack-quantized", {"weight_scale": None}, "weight_scale is missing"),
        ("int-quantized", {"weight": None}, "weight is missing"),
        ("int-quantized", {"weight": torch.zeros(ROWS, WIDTH)}, r"of int8, got torch\.float32"),
        ("int-quantized", {"weight": torch.zeros(4, WIDTH).char()}, "expected scales"),
        ("int-quantized", {"weight_scale": torch.ones(ROWS, 5)}, r"equal groups of \[8, 64\]"),
        ("int-quantized", {"weight_scale": torch.ones(ROWS, 4).int()}, "scales of floats"),
        ("pack-quantized", {"weight_packed": torch.zeros(ROWS, 7).int()}, r"got torch\.int32 \["),
        ("pack-quantized", {"weight_packed": torch.zeros(ROWS, 8)}, r"got torch\.float32 \["),
        ("pack-quantized", {"weight_g_idx": torch.full((WIDTH,), 9).int()}, "do not fit"),
        ("pack-quantized", {"weight_g_idx": torch.zeros(3).int()}, "do not fit"),
        ("gptq", {"qzeros": None}, "qzeros is missing"),
        ("gptq", {"scales": torch.ones(3, ROWS)}, "expected scales and zero points"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_the_projection(tmp_path, stored_as, changes, named):
    parts, _ = Scheme(stored_as=stored_as, bits=8 if "int" in stored_as else 4).stored(ROWS, WIDTH)
    parts = {name: part for name, part in (parts | changes).items() if part is not None}

    with pytest.raises(errors.ConfigError, match=rf"the quantized model\.x: .*{named}"):
        take(tmp_path, parts)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
PACKED = Scheme(stored_as="pack-quantized", bits=4).fields
GPTQ = Scheme(stored_as="gptq", bits=4).fields


def group(**changes):
    return PACKED | {"config_groups": {"g": PACKED["config_groups"]["group_0"] | changes}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "the quantization awq"),
        ({"bits": 4}, "the quantization None"),
        ("gptq", "a quantization_config that is no object"),
        (PACKED | {"config_groups": {"W4A16": ["Linear"]}}, "the name of a preset"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype int64"),
        (PACKED | {"format": "float-quantized"}, "the compressed-tensors format float-quantized"),
        (group(format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (group(weights={"type": "float", "num_bits": 8}), "type float in 8 bits"),
        (group(weights={"num_bits": 3}), "in 3 bits"),
        (group(weights={"num_bits": 8, "strategy": "block"}), "the quantization strategy block"),
        (group(input_activations={"dynamic": False}), "input_activations with stored scales"),
        (group(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(fields, named):
    with pytest.raises(
        errors.ConfigError, match=f"{named}.* is not supported; supported are Llama"
    ):
        config.parse(LLAMA | {"quantization_config": fields})


@pytest.mark.parametrize(
    "fields",
    [
        GPTQ,
        PACKED,
        {k: v for k, v in PACKED.items() if k != "quant_method"},
        group(input_activations={"num_bits": 8, "dynamic": True}),
        PACKED | {"sparsity_config": {"format": "dense"}, "transform_config": {}},
    ],
)
def test_supported_quantization_is_accepted(fields):
    assert config.parse(LLAMA | {"quantization_config": fields}).hidden_size == 64
