"""Quantized weights of a checkpoint, in 8 or 4 bits: what `quantization_config` may say, and their expansion to floats.

A stored matrix is integers q, with a scale s and a zero point z for each group of columns: w = (q - z) s. It is
expanded when it is loaded, in the type of its scales, as the libraries that write these formats do. So it takes the
memory of 16-bit weights, and the products of all weights compute it. The tensors of a projection [rows, columns]:

    pack-quantized (compressed-tensors)   weight_packed [rows, words], weight_scale [rows, groups],
                                          weight_zero_point [words, groups], weight_g_idx [columns]
    int-quantized (compressed-tensors)    weight of 8 bits, weight_scale and weight_zero_point [rows, groups]
    GPTQ                                  qweight [words, rows], scales [groups, rows], qzeros [groups, words],
                                          g_idx [columns]

A word has 32 bits, its first value in the lowest. Packed values are unsigned: of a symmetric matrix the middle value is
the zero point. `g_idx` is the group of each column, which only an activation order needs; otherwise groups are runs of
columns, and `g_idx` is absent or was never filled in: all 0 in GPTQ, -1 in compressed-tensors. A matrix that the writer
left as floats has none of these tensors, and their shapes tell bits and groups; so the lists of layers in
`quantization_config` are not needed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

BITS = (8, 4)
SUFFIXES = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("qweight", "scales", "qzeros", "g_idx"),
)
SUPPORTED = "quantized by GPTQ or compressed-tensors (pack-quantized, int-quantized) to 8 or 4 bits"


def unsupported_features(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a `quantization_config` has and the engine cannot compute; empty for one without any field."""
    if not isinstance(config, dict):
        yield "a quantization_config that is no object"
        return
    method = config.get("quant_method", "compressed-tensors" if "config_groups" in config else None)
    if method == "gptq":
        yield from _unsupported_in_gptq(config)
    elif method == "compressed-tensors":
        yield from _unsupported_in_compressed_tensors(config)
    elif config:
        yield f"the quantization {method}"


def _unsupported_in_gptq(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("bits") not in BITS:
        yield f"GPTQ of {config.get('bits')} bits"
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        yield f"the GPTQ checkpoint_format {config['checkpoint_format']}"
    if config.get("pack_dtype", "int32") != "int32":
        yield f"the GPTQ pack_dtype {config['pack_dtype']}"


def _unsupported_in_compressed_tensors(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            yield f"{name} of compressed-tensors"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        yield f"sparsity_config.format {config['sparsity_config']['format']} of compressed-tensors"
    for group in config.get("config_groups", {}).values():
        if isinstance(group, dict):
            yield from _unsupported_in_group(group, group.get("format") or config.get("format"))
        else:
            yield "a config group by the name of a preset"


def _unsupported_in_group(group: Mapping[str, Any], stored_as: object) -> Iterator[str]:
    if stored_as not in ("pack-quantized", "int-quantized"):
        yield f"the compressed-tensors format {stored_as}"
    weights = group.get("weights") or {}
    if weights.get("type", "int") != "int" or weights.get("num_bits") not in BITS:
        yield f"weights of type {weights.get('type')} in {weights.get('num_bits')} bits"
    if weights.get("strategy") not in ("tensor", "channel", "group"):
        yield f"the quantization strategy {weights.get('strategy')}"
    if (group.get("input_activations") or {"dynamic": True}).get("dynamic") is not True:
        yield "input_activations with stored scales"
    if group.get("output_activations"):
        yield "output_activations"


def gptq_zero_offset(config: Mapping[str, Any]) -> int:
    """Return what has to be added to each of GPTQ's zero points: its first format stores them less one."""
    return int(config.get("checkpoint_format", "gptq") == "gptq")


def expand(
    parts: Mapping[str, torch.Tensor], num_rows: int, width: int, *, gptq_zero_offset: int
) -> torch.Tensor:
    """Return the matrix [num_rows, width] that is stored in these tensors, by suffix, in the type of its scales.

    Raises ValueError for tensors of other shapes or types, or if one is missing.
    """
    try:
        if "qweight" in parts:
            matrix = _expand_gptq(parts, num_rows, width, gptq_zero_offset)
        else:
            matrix = _expand_compressed(parts, num_rows, width)
    except KeyError as error:
        raise ValueError(f"the tensor {error.args[0]} is missing") from error
    except (RuntimeError, IndexError, TypeError) as error:
        raise ValueError(f"its tensors do not fit together: {error}") from error
    if matrix.shape != (num_rows, width):
        raise ValueError(f"expected {[num_rows, width]}, got {list(matrix.shape)}")
    return matrix


def _expand_gptq(
    parts: Mapping[str, torch.Tensor], num_rows: int, width: int, zero_offset: int
) -> torch.Tensor:
    values, num_bits = _unpack(parts["qweight"].T, width)
    # The writer subtracts from whole words, so a zero point of 0 borrows from the one above it.
    offsets = sum(zero_offset << bit for bit in range(0, 32, num_bits))
    zeros, _ = _unpack(parts["qzeros"] + offsets, num_rows)
    return _scale(values, parts["scales"].T, zeros.T, parts.get("g_idx"))


def _expand_compressed(
    parts: Mapping[str, torch.Tensor], num_rows: int, width: int
) -> torch.Tensor:
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if scales.numel() == 1:  # one for the whole matrix
        scales = scales.reshape(1, 1).expand(num_rows, 1)
        zeros = zeros.reshape(1, 1).expand(num_rows, 1) if zeros is not None else None
    middle = 0
    if "weight_packed" in parts:
        values, num_bits = _unpack(parts["weight_packed"], width)
        middle = 2 ** (num_bits - 1)
    else:
        values = parts["weight"]
        if values.dtype != torch.int8:
            raise ValueError(f"expected weights of int8, got {values.dtype}")
    if zeros is None:
        zeros = torch.full_like(scales, middle, dtype=torch.int16)
    elif zeros.dtype == torch.int32:
        zeros = _unpack(zeros.T, num_rows)[0].T
    else:
        zeros = zeros.to(torch.int16) + middle
    return _scale(values, scales, zeros, parts.get("weight_g_idx"))


def _unpack(words: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
    """Return the first `number` unsigned values of each row of words, and their bits."""
    is_telling = words.dtype == torch.int32 and number > 4  # one word may hold four of either
    for num_bits in BITS:
        if is_telling and words.shape[1] == -(-number * num_bits // 32):
            values = words.contiguous().view(torch.uint8)  # the lowest bits first
            if num_bits == 4:
                values = torch.stack((values & 15, values >> 4), -1).flatten(1)
            return values[:, :number], num_bits
    raise ValueError(
        f"expected int32 words with {number} values (5 at least) of 8 or 4 bits, got {words.dtype} {list(words.shape)}"
    )


def _scale(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return (values - zeros) * scales; scales and zeros are [rows, groups]."""
    num_rows, num_groups = scales.shape
    if zeros.shape != scales.shape or values.shape[0] != num_rows or values.shape[1] % num_groups:
        raise ValueError(
            f"expected scales and zero points for equal groups of {list(values.shape)}, "
            f"got {list(scales.shape)} and {list(zeros.shape)}"
        )
    if not scales.is_floating_point():
        raise ValueError(f"expected scales of floats, got {scales.dtype}")
    runs = torch.arange(num_groups).repeat_interleave(values.shape[1] // num_groups)
    group_ids = runs if group_ids is None else group_ids
    is_filled_in = (group_ids >= 0).all() & group_ids.any()
    group_ids = torch.where(is_filled_in, group_ids, runs)
    centered = values.to(scales.dtype) - zeros.to(scales.dtype)[:, group_ids]
    return centered.mul_(scales[:, group_ids])
