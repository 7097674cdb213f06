"""Rotary position embedding: position p turns pair i of a head's dimensions by the angle p * frequency[i].

Pairs are (i, i + head_dim / 2), as Hugging Face checkpoints have them. The frequencies fall geometrically from 1
to 1 / theta. To reach beyond the context that a model was trained on, a *scaling* changes them:

- linear: all divided by a factor;
- dynamic: unchanged up to `max_position_embeddings`, which is this engine's limit with it;
- llama3: those that turn less than once within the original context divided, quick ones kept, a ramp between;
- yarn (arXiv 2309.00071): the same by another ramp, and all of attention a little sharper.

The angles of all positions are tabled once. A step looks its rows up, and then rotates queries and keys by
x * cos + swap_halves(x) * sin, with the minus sign of the first half kept in the table.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from dynamo.base import errors

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of a model, as its configuration describes it."""

    head_dim: int
    theta: float
    scaling: str
    parameters: dict[str, Any]  # of the scaling
    original_context: int

    @property
    def max_context(self) -> int:
        """Return the context in tokens that the scaling reaches, or the original context if it does not say."""
        factor = self.parameters["factor"] if self.scaling == "yarn" else 1
        return int(self.original_context * factor)

    def frequencies(self) -> torch.Tensor:
        """Return the frequencies [head_dim / 2] in radians per position."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = 1.0 / self.theta**exponents
        if self.scaling == "linear":
            return plain / self.parameters["factor"]
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain)
        return plain

    @property
    def sharpness(self) -> float:
        """Return the factor by which yarn multiplies queries and keys; 1 for other scalings."""
        if self.scaling != "yarn":
            return 1.0
        attention_factor = self.parameters.get("attention_factor")
        if attention_factor is not None:
            return float(attention_factor)
        mscale, mscale_all = self.parameters.get("mscale"), self.parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            return self._mscale(mscale) / self._mscale(mscale_all)
        return self._mscale(1.0)

    def tables(
        self, length: int, *, dtype: torch.dtype, device: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of the first `length` positions, each [length, 1, head_dim]."""
        angles = torch.outer(torch.arange(length).float(), self.frequencies())
        cos, sin = angles.cos() * self.sharpness, angles.sin() * self.sharpness
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return tuple(table.unsqueeze(1).to(device, dtype) for table in both)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        low, high = self.parameters["low_freq_factor"], self.parameters["high_freq_factor"]
        turns = self.original_context * plain / (2 * math.pi)  # within the original context
        ramp = ((turns - low) / (high - low)).clamp(0, 1)
        return ramp * plain + (1 - ramp) * plain / self.parameters["factor"]

    def _yarn(self, plain: torch.Tensor) -> torch.Tensor:
        fast, slow = self.parameters.get("beta_fast") or 32, self.parameters.get("beta_slow") or 1
        low, high = self._pair_with_turns(fast), self._pair_with_turns(slow)
        if self.parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        pairs = torch.arange(self.head_dim // 2).float()
        ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        return ramp * plain / self.parameters["factor"] + (1 - ramp) * plain

    def _pair_with_turns(self, num_turns: float) -> float:
        """Return the index, as a fraction, of the pair that turns so often within the original context."""
        ratio = self.original_context / (num_turns * 2 * math.pi)
        return self.head_dim * math.log(ratio) / (2 * math.log(self.theta))

    def _mscale(self, weight: float) -> float:
        factor = self.parameters["factor"]
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def parse(fields: dict[str, Any], *, head_dim: int, max_context: int) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`; both must agree. Raises ConfigError."""
    parameters = _merge_spellings(fields)
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in SCALINGS:
        raise errors.ConfigError(
            f"the RoPE scaling {scaling} is not supported; supported are {', '.join(SCALINGS)}"
        )
    for name in _REQUIRED.get(scaling, ()):
        if not isinstance(parameters.get(name), int | float):
            raise errors.ConfigError(f"the RoPE scaling {scaling} needs a number {name}")
    portion = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
    if portion != 1.0:
        raise errors.ConfigError(f"partial_rotary_factor {portion} is not supported; expected 1.0")
    original = fields.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    return Rope(
        head_dim=head_dim,
        theta=float(parameters.get("rope_theta") or fields.get("rope_theta") or 10_000.0),
        scaling=scaling,
        parameters=parameters,
        original_context=original or max_context,
    )


def _merge_spellings(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of both spellings. One may be an addition by hand, whose omission would go unnoticed."""
    new, old = (
        {"rope_type": given.get("type", "default"), **given} if given else {}
        for given in (fields.get("rope_parameters"), fields.get("rope_scaling"))
    )
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise errors.ConfigError(
                f"rope_parameters and rope_scaling have different {name}: {new[name]!r} and {old[name]!r}; "
                "expected one of them, as rope_parameters with its rope_theta"
            )
    return new | old


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, out: torch.Tensor) -> None:
    """Rotate x [tokens, heads, head_dim] by the tables' rows of its tokens [tokens, 1, head_dim]; out may be x."""
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)
