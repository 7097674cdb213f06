"""The watch over this process's own credentials: what changed in their files, and when its certificate expires.

Connections take the credentials as they are (`membership.Credentials.current`); the watch says in the log what became
of them, and has the seconds until expiry for a metric.
"""

import datetime
import logging
import math
import ssl
import time
from collections.abc import Callable, Sequence

from dynamo.base import clock, errors, membership
from dynamo.observability import metrics

_WEEK_S = 7 * 86_400.0
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name
_log = logging.getLogger(__name__)


class CredentialWatch:
    """The credentials of one process, looked at every second."""

    def __init__(
        self,
        credentials: membership.Credentials,
        pause: clock.Clock,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._known = credentials
        self._pause, self._wall_time_s = pause, wall_time_s
        self.expiry = CertificateExpiry("this process's certificate for the cluster", wall_time_s)
        self._problem: str | None = None
        self._note(credentials)

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await self._pause.sleep(membership.CHECK_S)
            self.check()

    def check(self) -> None:
        """Log what has changed since the last call."""
        latest = self._known.current()
        if latest is not self._known:
            self._known = latest
            tokens = sum(token is not None for token in (latest.token, latest.second_token))
            _log.info(
                "read the cluster's credentials again, because their files changed: %d tokens accepted",
                tokens,
            )
            self._note(latest)
        problem = latest.files.problem if latest.files is not None else None
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                _log.warning(
                    "the cluster's credentials have changed and cannot be used, so the former stay: %s",
                    problem,
                )
        self.expiry.check()

    def _note(self, credentials: membership.Credentials) -> None:
        if (tls := credentials.tls) is not None:
            self.expiry.set(tls.certificate, tls.key)


class CertificateExpiry:
    """When one certificate of this process expires, with a warning a week before, and at the end."""

    def __init__(self, name: str, wall_time_s: Callable[[], float] = time.time) -> None:
        self._name, self._wall_time_s = name, wall_time_s
        self._path = ""
        self._expires_at: float | None = None
        self._has_warned = self._has_expired = False

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the certificate expires, negative after; None without one."""
        return None if self._expires_at is None else self._expires_at - self._wall_time_s()

    def set(self, certificate: str, key: str) -> None:
        """Take the certificate at this path."""
        self._path, self._expires_at = certificate, find_expiry(certificate, key)
        self._has_warned = self._has_expired = False

    def check(self) -> None:
        """Warn once if the certificate expires within a week, and once if it has."""
        remaining_s = self.remaining_s
        if remaining_s is None or self._expires_at is None or remaining_s > _WEEK_S:
            return
        moment = datetime.datetime.fromtimestamp(self._expires_at, tz=datetime.UTC)
        if remaining_s <= 0 and not self._has_expired:
            self._has_expired = True
            _log.error(
                "%s (%s) expired at %s: others refuse it; replace the file, which is read again by itself",
                self._name, self._path, moment.isoformat(),
            )  # fmt: skip
        elif remaining_s > 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s (%s) expires at %s, in %.1f days: replace the file, which is read again by itself",
                self._name, self._path, moment.isoformat(), remaining_s / 86_400,
            )  # fmt: skip


def find_expiry(certificate: str, key: str) -> float | None:
    """Return when a certificate expires, in seconds since the epoch; None if it does not say so in the usual form.

    It is shown in a handshake in memory, because `ssl` reads only certificates that a peer has shown.
    Also None if the files cannot be used, as between the writing of two: whoever follows them calls again.
    """
    shown, looking = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    try:
        shown.load_cert_chain(certificate, key)
        looking.load_verify_locations(certificate)
    except OSError:  # of which ssl.SSLError is one
        return None
    looking.check_hostname = False
    looking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = shown.wrap_bio(to_server, to_client, server_side=True)
    client = looking.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return None
    not_after = (client.getpeercert() or {}).get("notAfter")
    return ssl.cert_time_to_seconds(not_after) if isinstance(not_after, str) else None


class ExpiryMetric:
    """The seconds until the certificates of this process expire."""

    def __init__(self, registry: metrics.Registry) -> None:
        self._gauge = registry.gauge(
            "certificate_expiry_seconds",
            "seconds until a certificate of this process expires, negative after; by its use: cluster or http",
            ("certificate",),
        )

    def follow(self, use: str, expiry: CertificateExpiry) -> None:
        """Show the expiry of one certificate, if there is one."""
        if expiry.remaining_s is not None:
            self._gauge.labels(use).set_function(lambda: _number(expiry.remaining_s))


def _number(remaining_s: float | None) -> float:
    """Return NaN, which fires no alert, for what is not known."""
    return math.nan if remaining_s is None else remaining_s


async def follow_files(
    name: str,
    paths: Sequence[str],
    read_again: Callable[[], None],
    pause: clock.Clock,
    expiry: CertificateExpiry | None = None,
) -> None:
    """Call `read_again` when one of these files has changed, until cancelled.

    It raises ConfigError for files that cannot be used, as between the writing of two; then it is called again.
    """
    stamp, problem = membership.stamp_files(paths), ""
    while True:
        await pause.sleep(membership.CHECK_S)
        latest = membership.stamp_files(paths)
        if latest != stamp:
            try:
                read_again()
            except errors.ConfigError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning(
                        "%s has changed and cannot be used, so the former stays: %s", name, problem
                    )
            else:
                stamp, problem = latest, ""
                _log.info("read %s again, because its files changed", name)
        if expiry is not None:
            expiry.check()
