"""A measured timing profile: how long steps took on a real engine, at some points; between them, lines.

    {"prefill_isl": [128, 2048, 8192],            new prompt tokens of a step, rising
     "prefill_ttft_ms": [9.1, 48.0, 171.5],       what such a step takes
     "decode_active_kv_tokens": [0, 100000],      tokens that the decoding sequences hold together, rising
     "decode_context_length": [500, 4000],        tokens that one of them holds on average, rising
     "decode_itl": [[5.5, 5.6], [21.0, 17.2]]}    ms of a step that gives each a token: a row per active_kv_tokens

The names are those of the arrays that the original's simulator reads. Beyond the measured points the last line goes on
for prefill, where a longer prompt surely takes longer; decoding stays at the border.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from dynamo.base import errors


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in ms. Made by `read`, which checks it."""

    prefill_isl: tuple[float, ...]
    prefill_ttft_ms: tuple[float, ...]
    decode_active_kv_tokens: tuple[float, ...]
    decode_context_length: tuple[float, ...]
    decode_itl: tuple[tuple[float, ...], ...]

    def prefill_ms(self, num_tokens: int) -> float:
        """To compute the new prompt tokens of a step."""
        if not num_tokens:
            return 0.0
        place = _place(self.prefill_isl, num_tokens, goes_on=True)
        return max(0.0, place.between(self.prefill_ttft_ms))

    def decode_ms(self, active_tokens: float, num_decoding: int) -> float:
        """To give every running sequence a token."""
        row = _place(self.decode_active_kv_tokens, active_tokens)
        column = _place(self.decode_context_length, active_tokens / max(1, num_decoding))
        return row.between([column.between(times) for times in self.decode_itl])


def read(content: bytes, source: str) -> Profile:
    """A profile from its file. Raises ConfigError, naming the source."""
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
    _check_lengths(profile, source)
    return profile


def _check_lengths(profile: Profile, source: str) -> None:
    widths = {len(row) for row in profile.decode_itl}
    told = {
        "prefill_ttft_ms": ({len(profile.prefill_ttft_ms)}, len(profile.prefill_isl)),
        "decode_itl": ({len(profile.decode_itl)}, len(profile.decode_active_kv_tokens)),
        "each row of decode_itl": (widths, len(profile.decode_context_length)),
    }
    for name, (found, expected) in told.items():
        if found != {expected}:
            raise errors.ConfigError(f"{source}: expected {name} to have {expected} entries")
    times = [*profile.prefill_ttft_ms, *(time for row in profile.decode_itl for time in row)]
    if min(times) < 0:
        raise errors.ConfigError(f"{source}: expected times of 0 or more, got {min(times)}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value lies among points: after this one, by this share of the way to the next."""

    index: int
    share: float

    def between(self, values: Sequence[float]) -> float:
        """The value there, on the line between its neighbours."""
        if not self.share:
            return values[self.index]
        return values[self.index] + self.share * (values[self.index + 1] - values[self.index])


def _place(points: Sequence[float], value: float, *, goes_on: bool = False) -> _Place:
    """Before the first point it is that one; after the last too, unless the last line goes on."""
    if value <= points[0] or len(points) == 1:
        return _Place(0, 0.0)
    if value >= points[-1] and not goes_on:
        return _Place(len(points) - 1, 0.0)
    index = min(bisect_right(points, value), len(points) - 1) - 1
    return _Place(index, (value - points[index]) / (points[index + 1] - points[index]))
