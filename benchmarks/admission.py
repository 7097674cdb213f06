"""What keys and the gate cost a request: `python -m benchmarks.admission`. CPU time, best and median of 7 rounds."""

import asyncio
import time
from collections.abc import Callable

from dynamo.base import clock
from dynamo.frontend.admission import api_keys, metrics, permits, rate_limits
from dynamo.observability import metrics as observed

NUM_REQUESTS = 20_000
NUM_ROUNDS = 7
PLENTY = "requests_per_minute = 1000000000\ntokens_per_minute = 1000000000000\n"


class Caller:
    """A client that never leaves."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """It does not."""


def ask_with_key(book: api_keys.ApiKeyRegistry) -> None:
    """What the door and the desk do for each request of a key with limits, whose tenant has some too."""
    headers, now = {"authorization": "Bearer sk-12345678-777"}, time.monotonic
    for _ in range(NUM_REQUESTS):
        guest = book.authenticate(headers)
        rate_limits.charge_request(guest.accounts, now())
        rate_limits.limit_headers(guest.accounts, now())
        guest = book.authenticate(headers)
        rate_limits.start_response(guest.accounts, 100, now())
        rate_limits.limit_headers(guest.accounts, now())
        rate_limits.finish_response(guest.accounts, 100, now())


async def pass_gate(entry: permits.ModelPermits) -> None:
    """In and out, with room."""
    caller = Caller()
    for _ in range(NUM_REQUESTS):
        await entry.acquire_permit(caller, priority=0, num_tokens=1, ignores_load=False)
        entry.release_permit()


def measure(name: str, work: Callable[[], None]) -> None:
    """Print it."""
    costs = []
    for _ in range(NUM_ROUNDS):
        began_at = time.process_time()
        work()
        costs.append((time.process_time() - began_at) / NUM_REQUESTS * 1e6)
    costs.sort()
    print(f"{name}: {costs[0]:.1f} us a request, median {costs[NUM_ROUNDS // 2]:.1f}")


def main() -> None:
    """Both, one after the other."""
    entries = "".join(
        f'[[keys]]\nname = "k{i}"\nkey = "sk-12345678-{i}"\ntenant = "t"\n{PLENTY}'
        for i in range(1000)
    )
    book = api_keys.ApiKeyRegistry()
    book.replace_keys(api_keys.parse_key_file(f"[tenants.t]\n{PLENTY}{entries}"), time.monotonic())
    counts = metrics.AdmissionMetrics(observed.Registry("bench"))
    rules = permits.AdmissionPolicy(concurrency_limit=64, queue_limit=8, queue_timeout_s=1)
    entry = permits.ModelPermits("m", rules, lambda: None, counts, clock.SystemClock())
    measure("key, tenant, limits, headers", lambda: ask_with_key(book))
    measure("gate", lambda: asyncio.run(pass_gate(entry)))


if __name__ == "__main__":
    main()
