"""The time of a step of the mock engine: from the polynomials of Dynamo's mocker, which were fitted to a real GPU, or
from a measured profile.

A profile has the times of steps of a real engine at some points; between them it is interpolated linearly.

    {"prefill_isl": [128, 2048, 8192],            new prompt tokens of a step, rising
     "prefill_ttft_ms": [9.1, 48.0, 171.5],       what such a step takes
     "decode_active_kv_tokens": [0, 100000],      tokens that the decoding sequences hold together, rising
     "decode_context_length": [500, 4000],        tokens that one of them holds on average, rising
     "decode_itl": [[5.5, 5.6], [21.0, 17.2]]}    ms of a step that gives each a token: a row per active_kv_tokens

The names are those of the arrays that Dynamo's mocker reads. Beyond the measured points prefill is extrapolated, since
a longer prompt surely takes longer; decode keeps the last value.
"""  # decider

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from dynamo.base import errors

INSTANT = 1e6  # from this ratio on (and at 0) a step takes no time at all


def prefill_ms(num_tokens: int) -> float:
    """Return the milliseconds to compute the new prompt tokens of a step, all sequences together."""
    if not num_tokens:
        return 0.0
    return 4.209989e-7 * num_tokens**2 + 1.518344e-2 * num_tokens + 16.50142


def decode_ms(active_share: float) -> float:
    """Return the milliseconds to give every running sequence a token, with this share of the KV cache in use."""
    share = active_share if active_share < 1.0 else 1.0  # simulations call this for every step
    return max(1.0, (54.01 - 25.74 * share) * share + 5.74)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured times in milliseconds. `read_profile` makes and checks it."""

    prefill_isl: tuple[float, ...]
    prefill_ttft_ms: tuple[float, ...]
    decode_active_kv_tokens: tuple[float, ...]
    decode_context_length: tuple[float, ...]
    decode_itl: tuple[tuple[float, ...], ...]

    def prefill_ms(self, num_tokens: int) -> float:
        """Return the milliseconds to compute the new prompt tokens of a step."""
        if not num_tokens:
            return 0.0
        point = _locate(self.prefill_isl, num_tokens, extrapolates=True)
        return max(0.0, point.interpolate(self.prefill_ttft_ms))

    def decode_ms(self, active_tokens: float, num_decoding: int) -> float:
        """Return the milliseconds to give every running sequence a token."""
        row = _locate(self.decode_active_kv_tokens, active_tokens)
        column = _locate(self.decode_context_length, active_tokens / max(1, num_decoding))
        return row.interpolate([column.interpolate(times) for times in self.decode_itl])


def read_profile(content: bytes, source: str) -> Profile:
    """Decode and check a profile file. Raises ConfigError, which names `source`."""
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.ConfigError(
            f"{source}: expected a JSON object of measured times: {error}"
        ) from error
    for name in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
        points = getattr(profile, name)
        if not points or any(a >= b for a, b in pairwise(points)):
            raise errors.ConfigError(f"{source}: expected {name} to rise, and at least one point")
    widths = {len(row) for row in profile.decode_itl}
    lengths = {
        "prefill_ttft_ms": ({len(profile.prefill_ttft_ms)}, len(profile.prefill_isl)),
        "decode_itl": ({len(profile.decode_itl)}, len(profile.decode_active_kv_tokens)),
        "each row of decode_itl": (widths, len(profile.decode_context_length)),
    }
    for name, (actual, expected) in lengths.items():
        if actual != {expected}:
            raise errors.ConfigError(f"{source}: expected {name} to have {expected} entries")
    times = [*profile.prefill_ttft_ms, *(time for row in profile.decode_itl for time in row)]
    if min(times) < 0:
        raise errors.ConfigError(f"{source}: expected times of 0 or more, got {min(times)}")
    return profile


@dataclass(frozen=True, slots=True)
class _Location:
    """The position of a value among rising points: after point `index`, by `share` of the way to the next."""

    index: int
    share: float

    def interpolate(self, values: Sequence[float]) -> float:
        if not self.share:
            return values[self.index]
        return values[self.index] + self.share * (values[self.index + 1] - values[self.index])


def _locate(points: Sequence[float], value: float, *, extrapolates: bool = False) -> _Location:
    """Locate a value; outside of the points it is at the border, unless it is extrapolated beyond the last."""
    if value <= points[0] or len(points) == 1:
        return _Location(0, 0.0)
    if value >= points[-1] and not extrapolates:
        return _Location(len(points) - 1, 0.0)
    index = min(bisect_right(points, value), len(points) - 1) - 1
    return _Location(index, (value - points[index]) / (points[index + 1] - points[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The parameters of the time of a step. With `tick_ms` every step takes that long, whatever it computes.

    `num_cache_tokens` is the size of the whole KV cache; only a profile needs it.
    """

    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    tick_ms: float | None = None
    profile: Profile | None = None
    num_cache_tokens: int = 0

    def step_s(self, *, num_prompt_tokens: int, num_decoding: int, active_share: float) -> float:
        """Return the seconds of a step; `active_share` of the cache's blocks, 0 to 1, are in use."""
        if self.tick_ms is not None:
            return self.tick_ms / 1000
        if _is_instant(self.speedup_ratio):
            return 0.0
        profile = self.profile
        duration_ms = (profile.prefill_ms if profile else prefill_ms)(num_prompt_tokens)
        if num_decoding and not _is_instant(self.decode_speedup_ratio):
            if profile is None:
                step_ms = decode_ms(active_share)
            else:
                step_ms = profile.decode_ms(active_share * self.num_cache_tokens, num_decoding)
            duration_ms += step_ms / self.decode_speedup_ratio
        return duration_ms / self.speedup_ratio / 1000


def _is_instant(ratio: float) -> bool:
    return ratio == 0 or ratio >= INSTANT
