"""Matrix products in every weight layout equal the plain one, and rows do not depend on each other."""

import types

import pytest
import torch

from dynamo.engine.native import models


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packing(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_stacked_projections_equal_separate_ones(dtype, has_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=generator).to(dtype)
    weights = [torch.randn(rows, 24, generator=generator).to(dtype) for rows in (8, 3, 5)]
    biases = [torch.randn(len(weight), generator=generator).to(dtype) for weight in weights]

    found = models.Linear(weights, biases if has_bias else [])(x)
    expected = [
        x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        found.double(), torch.cat(expected, 1), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("has_bias", [True, False])
def test_16_bit_weights_are_multiplied_in_32_bits(has_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 200, generator=generator)
    weight = torch.randn(30, 200, generator=generator).bfloat16().float()
    bias = torch.randn(30, generator=generator)

    found = models.Linear([weight], [bias] if has_bias else [])(x)
    expected = x.double() @ weight.double().T + (bias if has_bias else 0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "is_held"),
    [(0.1, False), (0.1015625, True), (70_000.0, False), (1.8e-6, True), (float("nan"), False)],
)
def test_only_weights_that_fit_16_bits_are_kept_in_16_bits(weight, is_held, monkeypatch):
    kept = []
    monkeypatch.setattr(models, "_halved", lambda *_: kept.append(True))
    quantized = types.SimpleNamespace(supported_engines=["fbgemm"])
    monkeypatch.setattr(torch.backends, "quantized", quantized)

    models.Linear([torch.tensor([[1.0, weight]])], [])

    assert bool(kept) is is_held


@pytest.mark.parametrize("is_rounded", [True, False])
@pytest.mark.parametrize("width", [64, 640, 1500])
def test_a_row_is_equal_to_the_bit_in_any_batch(is_rounded, width):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, width, generator=generator)
    product = models.Linear([weight.bfloat16().float() if is_rounded else weight], [])
    x = torch.randn(260, width, generator=generator)
    together = product(x)

    assert [n for n in range(4, 260, 4) if not torch.equal(product(x[:n]), together[:n])] == []
    assert torch.equal(product(x[60:]), together[60:])
