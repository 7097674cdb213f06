"""The mean of two trainings of the exact profile: `python -m training.semantic.encoder_mean FIRST SECOND --out OUT`.

Adapters of rank r are two thin matrices, so the mean of their products has rank 2 r: it is written as such, by putting
the matrices of both beside each other. A worker adds the product to the projection when it loads the model, so a text
costs as much as with one. Where the second training went on from the first (`--went-on`), their thin matrices are near
each other, and the mean of these keeps the rank.
"""

import argparse
import json
from pathlib import Path

import safetensors.torch
import torch

SHARE = 0.6  # of the second


def main() -> None:
    """Write the mean of two directories of adapters and heads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=SHARE, help="of the second")
    parser.add_argument("--went-on", action="store_true", help="the second began with the first")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shares = (1 - arguments.share, arguments.share)
    join_matrices = add_weights if arguments.went_on else join_adapters
    for name, join in (("adapter_model", join_matrices), ("heads", add_weights)):
        pair = [
            safetensors.torch.load_file(folder / f"{name}.safetensors")
            for folder in (arguments.first, arguments.second)
        ]
        joined = {key: join(key, pair, shares).half().contiguous() for key in pair[0]}
        safetensors.torch.save_file(joined, arguments.out / f"{name}.safetensors")
    fields = json.loads((arguments.first / "adapter_config.json").read_text())
    if not arguments.went_on:  # at the same scale
        fields |= {"r": 2 * fields["r"], "lora_alpha": 2 * fields["lora_alpha"]}
    (arguments.out / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    (arguments.out / "heads.json").write_bytes((arguments.second / "heads.json").read_bytes())


def join_adapters(
    name: str, pair: list[dict[str, torch.Tensor]], shares: tuple[float, float]
) -> torch.Tensor:
    """Return one of the two thin matrices of the mean; those behind carry the shares."""
    parts = [tensors[name].float() for tensors in pair]
    if "lora_A" in name:
        return torch.cat(parts, 0)
    return torch.cat([share * part for share, part in zip(shares, parts, strict=True)], 1)


def add_weights(
    name: str, pair: list[dict[str, torch.Tensor]], shares: tuple[float, float]
) -> torch.Tensor:
    """Return the mean of two matrices or biases."""
    return sum(
        (share * tensors[name].float() for share, tensors in zip(shares, pair, strict=True)),
        torch.zeros(()),
    )


if __name__ == "__main__":
    main()
