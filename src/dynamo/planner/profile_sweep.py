"""The sweep of a profile: which cells are measured in which order, and what follows from their results.

A prefill cell is a prompt length at batch 1; a decode cell is a number of sequences of one context length. The order
begins with the corners and the middle, so that an interrupted sweep has a usable profile. After a failure no cell that
is at least as large in both respects is tried.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from dynamo.planner.policies import Targets
from dynamo.planner.predictive_policy import Headroom, RequestShape, Sizing
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile

_MOST_ANSWER = 400  # tokens that a decode cell may need


class Cell(msgspec.Struct, frozen=True):
    """One measurement: a prompt of `context` tokens, or `concurrency` sequences of that context."""

    kind: Literal["prefill", "decode"]
    context: int
    concurrency: int = 1


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell: seconds of the prompt or between two tokens, or the reason of a failure."""

    cell: Cell
    seconds: float = 0.0
    failure: str = ""


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's model card says of it."""

    num_kv_tokens: int
    max_num_seqs: int
    context_length: int


def plan_cells(size: EngineSize, isl: int, osl: int) -> list[Cell]:
    """Return the cells of a sweep around a request of `isl` and `osl` tokens, the most telling first."""
    longest = size.context_length - max(osl, _MOST_ANSWER) - 8
    lengths = sorted({max(16, min(longest, int(isl * 2.0**e))) for e in range(-5, 3)})
    contexts = sorted({max(16, min(longest, int(isl * factor))) for factor in (0.25, 1, 2)})
    decode = []
    for context in contexts:
        most = min(size.max_num_seqs, size.num_kv_tokens // (context + osl + 64))
        numbers = [2**e for e in range(12) if 2**e < most] + [most]
        decode += [Cell("decode", context, number) for number in numbers if number > 0]
    prefill = [Cell("prefill", length) for length in lengths]
    orders = (_spread(prefill), _spread(decode))
    keyed = [(i / len(cells), cell) for cells in orders for i, cell in enumerate(cells)]
    return [cell for _, cell in sorted(keyed, key=lambda pair: pair[0])]


def _spread(cells: Sequence[Cell]) -> list[Cell]:
    """Return the first, the last and the middle cell, then the middles of what lies between."""
    order, gaps = list(cells[:1]) + list(cells[1:][-1:]), [(0, len(cells) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(cells[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def must_fail(cell: Cell, results: Sequence[CellResult]) -> bool:
    """Return True if a cell that is not larger in any respect has failed."""
    return any(
        result.failure
        and result.cell.kind == cell.kind
        and result.cell.context <= cell.context
        and result.cell.concurrency <= cell.concurrency
        for result in results
    )


def make_profile(results: Sequence[CellResult], size: EngineSize, osl: int) -> WorkerProfile | None:
    """Return the profile of the cells that were measured; None while prefill or decode has none."""
    good = [result for result in results if not result.failure]
    prefill = sorted((r for r in good if r.cell.kind == "prefill"), key=lambda r: r.cell.context)
    points = []
    for result in good:
        if result.cell.kind == "decode":
            context = result.cell.context + osl / 2
            usage = result.cell.concurrency * context / size.num_kv_tokens
            rate = result.cell.concurrency / result.seconds
            points.append(DecodePoint(min(1.0, usage), context, result.seconds, rate))
    if not prefill or not points:
        return None
    curve = PrefillCurve(
        isl=tuple(float(r.cell.context) for r in prefill),
        ttft_s=tuple(r.seconds for r in prefill),
        throughput=tuple(r.cell.context / r.seconds for r in prefill),
    )
    return WorkerProfile(
        prefill=curve, decode=DecodeSurface(points, max_kv_tokens=size.num_kv_tokens)
    )


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment with the most requests per second within the targets."""

    mode: Literal["agg", "disagg"]
    num_prefill: int
    num_decode: int  # or aggregated
    requests_per_s: float
    ttft_ms: float  # of one prompt on an idle worker
    itl_ms: float  # of an idle worker
    unreachable: str = ""


def recommend(
    profile: WorkerProfile, *, isl: int, osl: int, targets: Targets, num_workers: int
) -> Recommendation:
    """Compare aggregated workers with all splits of as many, at least one."""
    shape = RequestShape(isl=isl, osl=osl, context=isl + osl / 2)

    def sizing(mode: Literal["agg", "disagg"]) -> Sizing:
        scaled = Targets(mode=mode, ttft_s=targets.ttft_s, itl_s=targets.itl_s)
        return Sizing(profile, scaled, Headroom(), shape, burstiness=1.0)

    rates = {("agg", 0, num_workers): num_workers * sizing("agg").prompts_per_s}
    split = sizing("disagg")
    for num_prefill in range(1, num_workers):
        num_decode = num_workers - num_prefill
        rates["disagg", num_prefill, num_decode] = min(
            num_prefill * split.prompts_per_s, num_decode * split.decoded_per_s
        )
    (mode, num_prefill, num_decode), rate = max(rates.items(), key=lambda item: item[1])
    return Recommendation(
        mode="agg" if mode == "agg" else "disagg",
        num_prefill=num_prefill,
        num_decode=num_decode,
        requests_per_s=rate,
        ttft_ms=profile.prefill.prompt_s(isl) * 1e3,
        itl_ms=profile.decode.itl_s(0.0, shape.context) * 1e3,
        unreachable=split.unreachable,
    )
