"""How long a step of the simulated engine takes: by the polynomials of the original's simulator, which were fitted to a
real GPU, or by a measured profile.
"""

from dataclasses import dataclass

from dynamo.engine.mock.profile import Profile

INSTANT = 1e6  # from this ratio on (and at 0) a step takes no time at all


def prefill_ms(num_tokens: int) -> float:
    """To compute the new prompt tokens of a step, all sequences together."""
    if not num_tokens:
        return 0.0
    return 4.209989e-7 * num_tokens**2 + 1.518344e-2 * num_tokens + 16.50142


def decode_ms(active_share: float) -> float:
    """To give every running sequence a token, when this share of the KV cache is in use."""
    share = min(1.0, active_share)
    return max(1.0, -25.74 * share**2 + 54.01 * share + 5.74)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of a step. With `tick_ms` every step takes that long, whatever it holds.

    `num_cache_tokens` is what the whole KV cache holds; only a profile needs it.
    """

    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    tick_ms: float | None = None
    profile: Profile | None = None
    num_cache_tokens: int = 0

    def step_s(self, *, num_prompt_tokens: int, num_decoding: int, active_share: float) -> float:
        """Seconds that this step takes."""
        if self.tick_ms is not None:
            return self.tick_ms / 1000
        if _is_instant(self.speedup_ratio):
            return 0.0
        duration_ms = self._prefill_ms(num_prompt_tokens)
        if num_decoding and not _is_instant(self.decode_speedup_ratio):
            duration_ms += self._decode_ms(num_decoding, active_share) / self.decode_speedup_ratio
        return duration_ms / self.speedup_ratio / 1000

    def _prefill_ms(self, num_tokens: int) -> float:
        if self.profile is not None:
            return self.profile.prefill_ms(num_tokens)
        return prefill_ms(num_tokens)

    def _decode_ms(self, num_decoding: int, active_share: float) -> float:
        if self.profile is not None:
            return self.profile.decode_ms(active_share * self.num_cache_tokens, num_decoding)
        return decode_ms(active_share)


def _is_instant(ratio: float) -> bool:
    return ratio == 0 or ratio >= INSTANT
