"""Profiles and observations for tests of the planner."""

from dynamo.planner.observation import Fresh, Observation, PoolLoad, PoolState, Traffic
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile

PROMPT_S = 0.1  # of a prompt of 1,000 tokens


def make_profile() -> WorkerProfile:
    """10,000 prompt tokens a second; 10 ms between tokens in an empty cache, 110 ms in a full one."""
    isl = (100.0, 1000.0, 10_000.0)
    points = [
        DecodePoint(
            usage, context, 0.01 + 0.1 * usage, 100 * usage * 1000 / context / (0.01 + 0.1 * usage)
        )
        for context in (500.0, 2000.0)
        for usage in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    return WorkerProfile(
        prefill=PrefillCurve(isl=isl, ttft_s=tuple(n / 1e4 for n in isl), throughput=(1e4,) * 3),
        decode=DecodeSurface(points, max_kv_tokens=100_000),
    )


def observe(
    at: float = 0.0,
    num_requests: float = 100,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_waiting: int = 0,
    kv_usage: float = 0.3,
    interval_s: float = 10.0,
    traffic: object = None,
    **pools: object,
) -> Observation:
    """An observation of prompts of 1,000 tokens and answers of 100, with these workers ready."""
    values = {
        "traffic": traffic
        or Fresh(
            Traffic(
                num_requests=num_requests, isl=1000, osl=100, ttft_s=0.1, itl_s=0.02, duration_s=2.0
            )
        ),
        "prefill": PoolState(num_ready=num_prefill, startup_s=30.0),
        "decode": PoolState(num_ready=num_decode, startup_s=30.0),
        "prefill_load": PoolLoad(num_waiting=num_waiting),
        "decode_load": PoolLoad(kv_usage=kv_usage, num_running=int(num_requests > 0)),
    }
    return Observation(at=at, interval_s=interval_s, **(values | pools))


def make_steady_profile(
    prompt_tokens_per_s: float = 1e4, max_kv_tokens: int = 100_000
) -> WorkerProfile:
    """Decode that hardly slows down as the cache fills: prompts computed beside it are what an ITL suffers from."""
    isl = (100.0, 1000.0, 10_000.0)
    points = [
        DecodePoint(
            usage,
            1000.0,
            0.01 + 0.002 * usage,
            max_kv_tokens * usage / 1000 / (0.01 + 0.002 * usage),
        )
        for usage in (0.05, 0.5, 1.0)
    ]
    return WorkerProfile(
        prefill=PrefillCurve(
            isl=isl,
            ttft_s=tuple(n / prompt_tokens_per_s for n in isl),
            throughput=(prompt_tokens_per_s,) * 3,
        ),
        decode=DecodeSurface(points, max_kv_tokens=max_kv_tokens),
    )
