"""The CPU time of API keys and permits per request, best and median of 7 rounds: `python -m benchmarks.admission`."""

import asyncio
import time
from collections.abc import Callable

from dynamo.base import clock
from dynamo.frontend.admission import api_keys, controller, metrics, rate_limits
from dynamo.observability import metrics as observed

NUM_REQUESTS = 20_000
NUM_ROUNDS = 7
PLENTY = "requests_per_minute = 1000000000\ntokens_per_minute = 1000000000000\n"


class Caller:
    """A client that never leaves."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """It does not."""


def ask_with_key(registry: api_keys.ApiKeyRegistry) -> None:
    """Do what admission does for each request of a key with limits, and of a tenant with limits."""
    headers, now = {"authorization": "Bearer sk-12345678-777"}, time.monotonic
    for _ in range(NUM_REQUESTS):
        api_key = registry.authenticate(headers)
        rate_limits.charge_request(api_key.accounts, now())
        shown = rate_limits.with_limit_headers((), api_key.accounts, now())
        api_key = registry.authenticate(headers)
        rate_limits.start_response(api_key.accounts, 100, now())
        rate_limits.with_limit_headers(shown, api_key.accounts, now())
        rate_limits.finish_response(api_key.accounts, 100, now())


async def acquire_and_release(permits_of_model: controller.ModelPermits) -> None:
    """Acquire and release permits of which there are enough."""
    caller = Caller()
    for _ in range(NUM_REQUESTS):
        await permits_of_model.acquire_permit(caller, priority=0, num_tokens=1)
        permits_of_model.release_permit()


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
    registry = api_keys.ApiKeyRegistry()
    registry.replace_keys(
        api_keys.parse_key_file(f"[tenants.t]\n{PLENTY}{entries}"), time.monotonic()
    )
    counts = metrics.AdmissionMetrics(observed.Registry("bench"))
    rules = controller.AdmissionPolicy(concurrency_limit=64, queue_limit=8, queue_timeout_s=1)
    permits_of_model = controller.ModelPermits(
        "m", rules, lambda: None, counts, clock.SystemClock()
    )
    measure("key, tenant, limits, headers", lambda: ask_with_key(registry))
    measure("permit", lambda: asyncio.run(acquire_and_release(permits_of_model)))


if __name__ == "__main__":
    main()
