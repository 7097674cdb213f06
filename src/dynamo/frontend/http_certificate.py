"""The certificate of the HTTP server, which is read again when its files change."""

import ssl

from dynamo.base import clock, errors, membership, tls
from dynamo.frontend import config
from dynamo.runtime import credentials

_NAME = "the certificate of the HTTP server"


class HttpCertificate:
    """TLS of the HTTP server as the settings name it; `tls` is None if it serves plain HTTP."""

    def __init__(self, settings: config.FrontendConfig, shown: credentials.ExpiryMetric) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._settings = settings
        self.tls: ssl.SSLContext | None = None
        self._expiry: credentials.CertificateExpiry | None = None
        paths = (settings.tls_cert_path, settings.tls_key_path, settings.tls_client_ca_cert_path)
        self._paths = [path for path in paths if path]
        self._stamp = membership.stamp_files(self._paths)  # before they are read
        if settings.tls_cert_path is not None:
            self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._load(self.tls)
            files = (settings.tls_cert_path, settings.tls_key_path or "")
            self._expiry = credentials.CertificateExpiry(_NAME, files)
            shown.follow({"http": self._expiry})

    async def follow(self, pause: clock.Clock) -> None:
        """Read the files again when they change, for connections that begin then, until cancelled."""
        tls, paths = self.tls, self._paths
        if tls is None:
            return
        await credentials.follow_files(
            _NAME, paths, lambda: self._load(tls), pause, self._expiry, stamp=self._stamp
        )

    def _load(self, context: ssl.SSLContext) -> None:
        settings = self._settings
        certificate, key = settings.tls_cert_path or "", settings.tls_key_path or ""
        try:
            tls.load_certificate(context, certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise errors.ConfigError(
                "--tls-cert-path, --tls-key-path: expected a PEM certificate and its key, without a passphrase, in "
                f"{certificate} and {key}: {error}"
            ) from error
        authority = settings.tls_client_ca_cert_path
        if authority is not None:  # only clients with a certificate of this authority may connect
            try:
                context.load_verify_locations(authority)
            except (OSError, ssl.SSLError) as error:
                raise errors.ConfigError(
                    f"--tls-client-ca-cert-path: expected PEM certificates in {authority}: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
