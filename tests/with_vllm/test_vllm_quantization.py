"""The native engine expands quantized weights to the bits that the library which writes them does."""

import importlib.util
import itertools
import warnings

import pytest
import torch

if importlib.util.find_spec("compressed_tensors") is None:
    pytest.skip("compressed-tensors is not installed here: make test-vllm", allow_module_level=True)

from dynamo.engine.native import quantization

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what the library imports
    from compressed_tensors import quantization as written
    from compressed_tensors.compressors.naive_quantized import base as naive
    from compressed_tensors.compressors.pack_quantized import base as packed
    from compressed_tensors.quantization import utils

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, WIDTH, GROUP = 24, 96, 32
CASES = [
    case
    for case in itertools.product(
        ("pack", "int"), (8, 4), ("tensor", "channel", "group"), (True, False), (None, "group")
    )
    if (case[0] == "pack" or case[1] == 8) and (case[2] == "group" or case[4] is None)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expanded_weights_equal_those_of_compressed_tensors(case, dtype):
    stored_as, bits, strategy, is_symmetric, order = case
    arguments = written.QuantizationArgs(
        num_bits=bits,
        symmetric=is_symmetric,
        strategy=strategy,
        group_size=GROUP if strategy == "group" else None,
        actorder=order,
    )
    scheme = written.QuantizationScheme(targets=["Linear"], weights=arguments)
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(bits)).to(dtype)
    shape = {"tensor": (1, 1, -1), "channel": (ROWS, 1, -1), "group": (ROWS, -1, GROUP)}[strategy]
    groups = weight.reshape(shape)
    scales, zeros = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    if strategy == "tensor":
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    state = {"weight": weight, "weight_scale": scales.to(dtype)}
    if not is_symmetric:
        state["weight_zero_point"] = zeros.to(torch.int8)
    if order is not None:
        state["weight_g_idx"] = (torch.arange(WIDTH) % (WIDTH // GROUP)).to(torch.int32)
    library = (
        packed.PackedQuantizationCompressor
        if stored_as == "pack"
        else naive.IntQuantizationCompressor
    )
    stored = library.compress(state, scheme)

    found = quantization.expand(stored, ROWS, WIDTH, gptq_zero_offset=0)
    assert torch.equal(found, library.decompress(dict(stored), scheme)["weight"])
    assert found.dtype == dtype
