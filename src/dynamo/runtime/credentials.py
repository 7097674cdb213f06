"""The watch over this process's own credentials: what changed in their files, and when its certificate expires.

Connections take the credentials as they are (`membership.Credentials.current`); the watch says in the log what became
of them, and has the seconds until expiry for a metric.
"""

import datetime
import functools
import logging
import math
import ssl
import time
from collections.abc import Callable, Container, Mapping, Sequence

from dynamo.base import clock, errors, membership, tls
from dynamo.observability import metrics

_WEEK_S = 7 * 86_400.0
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name
_CLIENT_CERTIFICATES = {  # the variables with the files of the certificate and key that are shown to a service
    "etcd": ("ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"),
    "nats": ("NATS_TLS_CLIENT_CERT_PATH", "NATS_TLS_CLIENT_KEY_PATH"),
}
_log = logging.getLogger(__name__)


def client_certificates(
    services: Container[str], environ: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the files of the certificate and key that this process shows to each of these services, if it does."""
    files = {
        service: (environ.get(certificate, ""), environ.get(key, ""))
        for service, (certificate, key) in _CLIENT_CERTIFICATES.items()
        if service in services
    }
    return {service: pair for service, pair in files.items() if all(pair)}


class CredentialWatch:
    """The credentials of one process, looked at every second."""

    def __init__(
        self,
        credentials: membership.Credentials,
        pause: clock.Clock,
        wall_time_s: Callable[[], float] = time.time,
        client_certificates: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """`client_certificates`: files of the certificate and key that are shown to a service, by its name."""
        self._known = credentials
        self._pause = pause
        self._problem: str | None = None
        self.expiries = {
            service: CertificateExpiry(
                f"this process's certificate for {service}", files, wall_time_s=wall_time_s
            )
            for service, files in (client_certificates or {}).items()
        }
        if (mutual := credentials.tls) is not None:
            own = "this process's certificate for the cluster"
            self.expiries["cluster"] = CertificateExpiry(
                own, (mutual.certificate, mutual.key), wall_time_s=wall_time_s
            )
            self.expiries["cluster-authority"] = CertificateExpiry(
                f"the authority of {own}",
                (mutual.authority, mutual.certificate, mutual.key),
                find_authority_expiry,
                wall_time_s=wall_time_s,
            )

    @property
    def has_files(self) -> bool:
        """True if there is something to watch."""
        return self._known.files is not None or bool(self.expiries)

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
        problem = latest.files.problem if latest.files is not None else None
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                _log.warning(
                    "the cluster's credentials have changed and cannot be used, so the former stay: %s",
                    problem,
                )
        for expiry in self.expiries.values():
            expiry.check()


class CertificateExpiry:
    """When one certificate that this process uses expires, with a warning a week before, and at the end.

    Its files are read again when they change.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        find: Callable[..., float | None] | None = None,
        *,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        """`find` gets the paths, and returns when the certificate in the first of them expires: `find_expiry`."""
        self._name, self._paths, self._wall_time_s = name, paths, wall_time_s
        self._find = find or find_expiry
        self._stamp: object = None
        self._expires_at: float | None = None
        self._has_warned = self._has_expired = False
        self._read_again()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the certificate expires, negative after; None if it does not say when."""
        return None if self._expires_at is None else self._expires_at - self._wall_time_s()

    def check(self) -> None:
        """Warn once if the certificate expires within a week, and once if it has."""
        self._read_again()
        remaining_s = self.remaining_s
        if remaining_s is None or self._expires_at is None or remaining_s > _WEEK_S:
            return
        moment = datetime.datetime.fromtimestamp(self._expires_at, tz=datetime.UTC)
        if remaining_s <= 0 and not self._has_expired:
            self._has_expired = True
            _log.error(
                "%s (%s) expired at %s: others refuse it; replace the file, which is read again by itself",
                self._name, self._paths[0], moment.isoformat(),
            )  # fmt: skip
        elif remaining_s > 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s (%s) expires at %s, in %.1f days: replace the file, which is read again by itself",
                self._name, self._paths[0], moment.isoformat(), remaining_s / 86_400,
            )  # fmt: skip

    def _read_again(self) -> None:
        stamp = membership.stamp_files(self._paths)
        if stamp != self._stamp:
            self._stamp, self._expires_at = stamp, self._find(*self._paths)
            self._has_warned = self._has_expired = False


def find_expiry(certificate: str, key: str) -> float | None:
    """Return when a certificate expires, in seconds since the epoch; None if it does not say so in the usual form.

    Also None if the files cannot be used, as between the writing of two.
    """
    return _expiry(_read_certificate(certificate, key))


def find_authority_expiry(authority: str, certificate: str, key: str) -> float | None:
    """Return when the authority that signed a certificate expires, as `find_expiry` does.

    Of several in the file with the name of the certificate's issuer, which are one authority with certificates of
    several years, the last counts.
    """
    issuer = _read_certificate(certificate, key).get("issuer")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority)
    except OSError:
        return None
    found = [each for each in context.get_ca_certs() if each.get("subject") == issuer]
    return max((time for each in found if (time := _expiry(each)) is not None), default=None)


def _expiry(certificate: Mapping[str, object]) -> float | None:
    not_after = certificate.get("notAfter")
    return ssl.cert_time_to_seconds(not_after) if isinstance(not_after, str) else None


def _read_certificate(certificate: str, key: str) -> Mapping[str, object]:
    """Return the fields of a certificate as `ssl` names them; none if the files cannot be used.

    It is shown in a handshake in memory, because `ssl` reads only certificates that a peer has shown.
    """
    shown, looking = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    try:
        shown.load_cert_chain(certificate, key, tls.NO_PASSPHRASE)
        looking.load_verify_locations(certificate)
    except OSError:  # of which ssl.SSLError is one
        return {}
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
            return {}
    return client.getpeercert() or {}


class ExpiryMetric:
    """The seconds until the certificates of this process expire."""

    def __init__(self, registry: metrics.Registry) -> None:
        self._gauge = registry.gauge(
            "certificate_expiry_seconds",
            "seconds until a certificate of this process expires, negative after, by its use: cluster,"
            " cluster-authority, etcd, nats or http",
            ("certificate",),
        )

    def follow(self, expiries: Mapping[str, CertificateExpiry]) -> None:
        """Show the expiry of certificates, by their use."""
        for use, expiry in expiries.items():
            self._gauge.labels(use).set_function(functools.partial(_number, expiry))


def _number(expiry: CertificateExpiry) -> float:
    """Return NaN, which fires no alert, for what is not known."""
    return math.nan if expiry.remaining_s is None else expiry.remaining_s


async def follow_files(
    name: str,
    paths: Sequence[str],
    read_again: Callable[[], None],
    pause: clock.Clock,
    expiry: CertificateExpiry | None = None,
    *,
    stamp: object,
) -> None:
    """Call `read_again` when one of these files has changed, until cancelled.

    `stamp` is that of the files before they were read first (`membership.stamp_files`): they may have changed since.
    `read_again` raises ConfigError for files that cannot be used, as between the writing of two; then it is called
    again.
    """
    problem = ""
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
