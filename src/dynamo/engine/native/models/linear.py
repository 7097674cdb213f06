"""Matrix products with weights that never change, in the layout that is quickest to read.

On a CPU a small batch is bound by reading the weights. They are kept in the first of three layouts that is possible:

- **halves**: 16 bits for each weight, widened as they are read, with all arithmetic in 32 bits (FBGEMM, on x86).
  Only for weights that 16 bits hold, which is so wherever the checkpoint is in bfloat16 or float16;
- **packed**: oneDNN's own layout, which it reads two to three times as fast as the plain one;
- **plain**, as on all other devices.

torch has the operators of the first two for its quantizer and its compiler.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_EXPECTED_ROWS = 32  # oneDNN's layout is best for about so many
_HALF_ERROR = 2**-25  # of a bfloat16 that is too small to be exact in float16
_CHECKED_ROWS = 64  # at once: few enough for the processor's cache

Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """y = x Wᵀ + b. The rows of several projections of the same x are stacked into one."""

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = torch.cat(biases) if biases else None
        if _can_halve(weight):
            self._product = _halved(weight, bias)
        elif _can_pack(weight):
            self._product = _packed(weight, bias)
        else:
            self._product = lambda x: F.linear(x, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, in] to [rows, out]."""
        return self._product(x)


def _can_halve(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return all(
        bool(((rows.half().float() - rows).abs_().amax() <= _HALF_ERROR).item())
        for rows in weight.split(_CHECKED_ROWS)
    )


def _halved(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")
