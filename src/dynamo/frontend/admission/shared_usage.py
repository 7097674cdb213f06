"""The usage of API keys that several processes at one port share: each reports to the others what was charged at it.

Reports go out every `INTERVAL_S` while there is something to report, so a limit holds for all processes together, but
for the requests of the last second. A report that does not arrive is not repeated. A process that is started anew knows
nothing of what was charged before.
"""

import contextlib
from collections.abc import Callable, Mapping

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend.admission import rate_limits
from dynamo.frontend.processes import peers
from dynamo.runtime.http import exchange

INTERVAL_S = 1.0
PATH = "/usage_of_keys"


class UsageReport(msgspec.Struct, frozen=True, array_like=True):
    """What a process tells the others."""

    process: str
    usage_by_account: dict[str, rate_limits.AccountUsage]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UsageReport).decode
ListAccounts = Callable[[], Mapping[str, rate_limits.RateAccount]]


class SharedUsage:
    """Keeps the accounts of this process and of its peers equal."""

    def __init__(
        self, list_accounts: ListAccounts, siblings: peers.Peers, clock: clocks.Clock
    ) -> None:
        """`list_accounts` returns the accounts of the keys and tenants that are valid now, by name."""
        self._list_accounts = list_accounts
        self._siblings = siblings
        self._clock = clock
        self.routes: peers.PeerRoutes = {("POST", PATH): self._receive}

    async def run(self) -> None:
        """Report until cancelled. Does nothing if this process is alone."""
        while self._siblings.name is not None:
            await self._clock.sleep(INTERVAL_S)
            reports = {
                name: account.take_report() for name, account in self._list_accounts().items()
            }
            usage = {name: report for name, report in reports.items() if report is not None}
            if usage:
                report = _encode(UsageReport(self._siblings.name, usage))
                with contextlib.suppress(OSError):  # no more files can be open: not reported
                    await self._siblings.ask_all("POST", PATH, report)

    def _receive(self, client: exchange.Exchange) -> None:
        """Charge what a peer reports; accounts that are not in our version of the key file are left out."""
        report, accounts = _decode(client.request.body), self._list_accounts()
        now = self._clock.now()
        for name, usage in report.usage_by_account.items():
            if name in accounts:
                accounts[name].add_usage(report.process, usage, now)
        client.respond(200, b"")
