"""What a key uses at one process counts at its siblings, here objects of one process over real sockets."""

import asyncio
import contextlib

import pytest

from dynamo.frontend.admission import rate_limits
from dynamo.frontend.processes import peers
from dynamo.testing import clock as clocks
from waiting import until


@pytest.fixture
async def processes(tmp_path):
    """The accounts of two processes, of which the first also has a key that the second has not read yet."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name, keys in (("1", ("alice", "new")), ("2", ("alice",))):
            limits = rate_limits.RateLimits(requests_per_minute=60, concurrent_streams=2)
            accounts = {key: rate_limits.RateAccount(key, limits, now=0.0) for key in keys}
            sibling = peers.Peers(str(tmp_path / f"{name}.sock"))
            clock = clocks.VirtualClock()
            shared = peers.SharedUsage(lambda found=accounts: found, sibling, clock)
            await sibling.start(shared.routes)
            stack.push_async_callback(sibling.close)
            made.append((accounts, shared, clock))
        yield made


async def test_process_tells_the_others_once_a_second_what_was_charged_at_it(processes):
    (accounts, shared, clock), (others, _, clock_of_others) = processes
    running = asyncio.ensure_future(shared.run())
    for account in accounts.values():
        rate_limits.charge_request((account,), clock.now())
        rate_limits.start_response((account,), 1, clock.now())
    await clock.advance(0.9 * peers.REPORT_INTERVAL_S)
    level_before = others["alice"].requests.level(clock_of_others.now())
    await clock.advance(0.1 * peers.REPORT_INTERVAL_S)
    await until(lambda: others["alice"].count_streams(clock_of_others.now()))
    running.cancel()

    assert level_before == 60
    assert others["alice"].requests.level(clock_of_others.now()) == 59


class Siblings:
    """Processes whose folder cannot be read the first time."""

    name = "1"

    def __init__(self):
        self.reports = []

    async def ask_all(self, method, path, report):
        self.reports.append(report)
        if len(self.reports) == 1:
            raise OSError("Too many open files")


async def test_process_without_free_files_reports_again_a_second_later():
    clock, siblings = clocks.VirtualClock(), Siblings()
    account = rate_limits.RateAccount("a", rate_limits.RateLimits(tokens_per_minute=60), now=0.0)
    shared = peers.SharedUsage(lambda: {"a": account}, siblings, clock)
    running = asyncio.ensure_future(shared.run())
    for _ in range(2):
        rate_limits.charge_tokens((account,), 5, clock.now())
        await clock.advance(peers.REPORT_INTERVAL_S)
    is_over = running.done()
    running.cancel()

    assert (len(siblings.reports), is_over) == (2, False)


async def test_process_that_is_alone_tells_nobody():
    alone = peers.SharedUsage(dict, peers.Peers(None), clocks.VirtualClock())

    await alone.run()
