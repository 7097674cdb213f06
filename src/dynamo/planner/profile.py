"""The profile of one worker: how long a prompt takes, and how fast it decodes, measured at some points.

Prefill is a curve over the prompt's length. Decode is a surface over the share of the KV cache in use and the context
length of a sequence: for each measured length a curve over the share. Between points values are linear; outside of them
they keep the value at the border, except that a prompt longer than all measured ones takes longer in proportion.
Tokens of the KV cache that several sequences share take room once, but an engine may read them for each sequence.
Throughput is in tokens per second and GPU, as in the files of the original; times are seconds.
"""  # decider

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dynamo.base import errors
from dynamo.protocols import load

_SCAN_POINTS = 100  # shares of the KV cache at which a target is looked for
_MOST_FACTOR = 4.0  # of a correction, up and down
_LEAST_PASSES = 3  # that say how wrong a profile is
_LEAST_SHARE = 0.25  # of a mean prompt, in a pass that says so: what surrounds a pass is in the profile as well
_SMOOTHING = 0.3  # weight of the newest interval
_STEPS = 20  # by which a factor is rounded to 1 / 20


def interpolate(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at `at`, linear between rising points and constant outside of them."""
    if at <= points[0] or len(points) == 1:
        return values[0]
    if at >= points[-1]:
        return values[-1]
    i = bisect_right(points, at) - 1
    share = (at - points[i]) / (points[i + 1] - points[i])
    return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCurve:
    """The time of one prompt on an idle worker, by its length."""

    isl: tuple[float, ...]  # rising
    ttft_s: tuple[float, ...]
    throughput: tuple[float, ...]  # prompt tokens/s of a GPU

    def __post_init__(self) -> None:
        """Check the points. Raises ConfigError."""
        sizes = {len(self.isl), len(self.ttft_s), len(self.throughput)}
        if not self.isl or len(sizes) > 1 or any(a >= b for a, b in pairwise(self.isl)):
            raise errors.ConfigError(
                f"prefill profile: expected as many times and throughputs as rising prompt lengths, got {sizes}"
            )
        for isl, ttft_s, throughput in zip(self.isl, self.ttft_s, self.throughput, strict=True):
            if not all(math.isfinite(x) and x > 0 for x in (isl, ttft_s, throughput)):
                raise errors.ConfigError(
                    f"prefill profile: expected values above 0, got isl={isl:g}, ttft_s={ttft_s:g},"
                    f" throughput={throughput:g}"
                )

    def prompt_s(self, num_tokens: float) -> float:
        """Return the seconds that a prompt with this many new tokens takes on an idle worker."""
        if num_tokens <= 0:
            return 0.0
        longest = self.isl[-1]
        return interpolate(self.isl, self.ttft_s, num_tokens) * max(1.0, num_tokens / longest)

    def tokens_per_s(self, num_tokens: float) -> float:
        """Return the prompt tokens that a GPU computes in a second, for prompts of this length."""
        return interpolate(self.isl, self.throughput, num_tokens)

    def scaled(self, factor: float) -> "PrefillCurve":
        """Return the curve of a worker that takes `factor` times as long."""
        return PrefillCurve(
            isl=self.isl,
            ttft_s=tuple(factor * each for each in self.ttft_s),
            throughput=tuple(each / factor for each in self.throughput),
        )


class DecodePoint(NamedTuple):
    """One measured point of decode."""

    kv_usage: float  # 0 to 1
    context: float  # tokens of a sequence
    itl_s: float
    throughput: float  # output tokens/s of a GPU


class DecodeRate(NamedTuple):
    """The operating point of a decode worker."""

    throughput: float  # output tokens/s of a GPU
    itl_s: float
    kv_usage: float


class DecodeSurface:
    """The time between two tokens, by use of the KV cache and context length."""

    def __init__(
        self, points: Sequence[DecodePoint], *, max_kv_tokens: int, repeated_cost: float = 0.0
    ) -> None:
        """Arrange measured points. Raises ConfigError for none, or for values that are not above 0.

        `repeated_cost` is what a shared token costs each further sequence, from 0 to 1 of a token of its own.
        """
        if not points or max_kv_tokens < 1:
            raise errors.ConfigError(
                f"decode profile: expected points and a KV cache, got {len(points)} and {max_kv_tokens} tokens"
            )
        for point in points:
            are_numbers = all(math.isfinite(value) for value in point)
            if not (are_numbers and point.itl_s > 0 and point.throughput > 0):
                raise errors.ConfigError(
                    f"decode profile: expected times and throughputs above 0, got {point}"
                )
        self.points = tuple(sorted(points, key=lambda p: (p.context, p.kv_usage)))
        self.max_kv_tokens = max_kv_tokens
        self.repeated_cost = repeated_cost
        self._contexts = sorted({p.context for p in points})
        curves = [[p for p in self.points if p.context == c] for c in self._contexts]
        self._usages = [[point.kv_usage for point in curve] for curve in curves]  # by context
        self._itls = [[point.itl_s for point in curve] for curve in curves]
        self._throughputs = [[point.throughput for point in curve] for curve in curves]

    def itl_s(self, kv_usage: float, context: float) -> float:
        """Return the seconds between two tokens of a sequence."""
        return self._interpolate(self._itls, kv_usage, context)

    def step_s(self, num_sequences: float, context: float) -> float:
        """Return the seconds in which so many sequences of this length get a token each.

        A step's time is linear in the length for a number of sequences, and not for a share of the KV cache.
        """
        usages = [min(1.0, num_sequences * each / self.max_kv_tokens) for each in self._contexts]
        curves = zip(self._usages, self._itls, usages, strict=True)
        return interpolate(self._contexts, [interpolate(*curve) for curve in curves], context)

    def throughput(self, kv_usage: float, context: float) -> float:
        """Return the output tokens that a GPU writes in a second."""
        return self._interpolate(self._throughputs, kv_usage, context)

    def best_rate(self, itl_s: float, context: float) -> DecodeRate:
        """Return the fullest operating point that holds a time between tokens; the emptiest if none does.

        It has no more sequences than were measured at once: an engine may take no more of them.
        """
        usage = 0.0
        for i in range(_SCAN_POINTS - 1, -1, -1):
            usage = i / (_SCAN_POINTS - 1)
            if self.itl_s(usage, context) <= itl_s:
                break
        shares = (point.kv_usage / point.context for point in self.points if point.context > 0)
        fullest = context * max(shares, default=math.inf)  # by the most sequences at once
        return DecodeRate(
            throughput=self.throughput(usage, context),
            itl_s=self.itl_s(usage, context),
            kv_usage=min(usage, fullest),
        )

    def scaled(self, factor: float) -> "DecodeSurface":
        """Return the surface of a worker that takes `factor` times as long."""
        points = [
            point._replace(itl_s=factor * point.itl_s, throughput=point.throughput / factor)
            for point in self.points
        ]
        return DecodeSurface(
            points, max_kv_tokens=self.max_kv_tokens, repeated_cost=self.repeated_cost
        )

    def with_repeated_cost(self, cost: float) -> "DecodeSurface":
        """Return the surface of a worker for which a shared token costs each further sequence so much."""
        return DecodeSurface(self.points, max_kv_tokens=self.max_kv_tokens, repeated_cost=cost)

    def _interpolate(self, curves: list[list[float]], kv_usage: float, context: float) -> float:
        """Return a value of curves over the use of the KV cache, one for each context."""
        pairs = zip(self._usages, curves, strict=True)
        by_context = [interpolate(usages, curve, kv_usage) for usages, curve in pairs]
        return interpolate(self._contexts, by_context, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """What one prefill worker and one decode worker can do."""

    prefill: PrefillCurve
    decode: DecodeSurface


class ProfileCorrection:
    """The profile of a worker, corrected by the times of forward passes in service.

    A pass does not wait, so its time over that of the profile says how wrong the profile is, whatever the load. A
    factor near 1 is left out: the profile is then as exact as its measurement.
    """

    def __init__(self, measured: WorkerProfile) -> None:
        self._measured = self.profile = measured
        self._factors = {"prefill": 1.0, "decode": 1.0}

    def learn(self, passes: Sequence[load.ForwardPass], *, isl: float, context: float) -> None:
        """Take passes, of a time in which prompts had `isl` new tokens, and sequences `context` tokens."""
        prefill, decode = self._measured.prefill, self._measured.decode
        ratios = {
            "prefill": [
                each.wall_s / prefill.prompt_s(each.num_prompt_tokens)
                for each in passes
                if each.num_prompt_tokens > _LEAST_SHARE * isl and not each.num_kv_tokens
            ],
            "decode": [
                each.wall_s / decode.itl_s(each.num_kv_tokens / decode.max_kv_tokens, context)
                for each in passes
                if each.num_kv_tokens and not each.num_prompt_tokens
            ],
        }
        before = self.factors
        for pool, values in ratios.items():
            if len(values) >= _LEAST_PASSES:
                seen = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, statistics.median(values)))
                self._factors[pool] += _SMOOTHING * (seen - self._factors[pool])
        if self.factors != before:
            factors = self.factors
            self.profile = WorkerProfile(
                prefill=prefill.scaled(factors[0]), decode=decode.scaled(factors[1])
            )

    def describe(self) -> str:
        """Return the correction as the end of a sentence; empty without one."""
        prefill, decode = self.factors
        if (prefill, decode) == (1.0, 1.0):
            return ""
        return f", prompts take {prefill:.2f} and answers {decode:.2f} of the profile's times"

    @property
    def factors(self) -> tuple[float, float]:
        """Return by how much a prompt and a decode step take longer than measured, rounded."""
        near = range(_STEPS - 1, _STEPS + 2)
        steps = (round(factor * _STEPS) for factor in self._factors.values())
        prefill, decode = (1.0 if each in near else each / _STEPS for each in steps)
        return prefill, decode
