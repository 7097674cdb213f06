"""The credentials that the processes of a cluster show each other: a shared token, TLS certificates, or both.

The token proves that a peer belongs to the cluster (`proof`); certificates prove that too and encrypt the connection.
On loopback nothing is required; any other address is refused without one of them, unless the user says `--insecure`.

The token comes from a file or from the environment, because every user of a machine can read the flags of a process.

With discovery by files a process without either takes the *local token*: a secret in the discovery directory, which
the first process makes and only this user can read. So other users of the host are kept out without any setting. It
does not open an address off loopback: no process of another host could have it.

Files are read again when they change (`Credentials.current`), for connections that begin then; those that exist stay.
A token file may have two lines: the first token is shown, both are accepted, so tokens can be changed one process
after the other.
"""

import contextlib
import ipaddress
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dynamo.base import config, errors, local_users, proof, tls

TOKEN_VARIABLE = "DYN_CLUSTER_TOKEN"
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
CHECK_S = 1.0  # between two looks at the files
_LOCAL_TOKEN = "token"  # the name of its file


@dataclass(frozen=True, kw_only=True)  # without slots, so that it can be combined with other bases
class ClusterConfig:
    """Settings of the connections between the processes of one cluster: how they meet, address and credentials."""

    discovery_backend: Literal["file", "etcd", "kubernetes", "mem"] = config.setting(
        "file",
        aliases=("--store-kv",),
        implied=("ETCD_ENDPOINTS", "etcd"),
        help="how processes find each other: by a directory of this host, by etcd (also if ETCD_ENDPOINTS is set), by"
        " the objects of the Kubernetes cluster that it runs in, or within one process only",
    )
    file_kv: str | None = config.setting(
        None, help="directory of file discovery; by default one per user"
    )
    tcp_rpc_host: str = config.setting(
        "127.0.0.1",
        help="address on which this process listens for others, and by which they reach it",
    )
    tcp_rpc_advertise: str | None = config.setting(
        None,
        help="address or address:port by which others reach this process, if it is another than it listens on, as"
        " behind a NAT; --tcp-rpc-host may then be 0.0.0.0",
    )
    cluster_token_file: str | None = config.setting(
        None,
        help="file with the secret that all processes of the cluster share, at least 16 bytes, and in a second line"
        f" another that is accepted too, while it is changed; or the secret itself in {TOKEN_VARIABLE}",
    )
    cluster_tls_cert_path: str | None = config.setting(
        None, help="certificate (PEM) of this process, for TLS with the others"
    )
    cluster_tls_key_path: str | None = config.setting(
        None, help="private key (PEM) of that certificate"
    )
    cluster_tls_ca_cert_path: str | None = config.setting(
        None,
        help="certificates (PEM) of the authority whose certificates the others must show; the cluster's own",
    )
    insecure: bool = config.setting(
        False,
        help="listen on any address without a token or certificates: whoever reaches it is served, other users of this"
        " host too",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS in which both sides show a certificate of the cluster's authority."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    # path of the certificate that is shown, of its key, and of the authorities
    certificate: str = ""
    key: str = ""
    authority: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that this process shows and expects."""

    token: bytes | None = field(default=None, repr=False)
    second_token: bytes | None = field(default=None, repr=False)  # accepted, but not shown
    tls: Tls | None = None
    is_insecure: bool = False
    is_local: bool = False  # the token is that of the discovery directory
    files: "CredentialFiles | None" = field(default=None, repr=False, compare=False)

    @property
    def has_cluster_token(self) -> bool:
        """True if the processes of other hosts can have the token."""
        return self.token is not None and not self.is_local

    def current(self) -> "Credentials":
        """Return the credentials as their files have them now; those that came from no file do not change."""
        return self if self.files is None else self.files.current()

    def derive_keys(self, purpose: str) -> tuple[bytes, ...]:
        """Return the keys of the accepted tokens for one purpose, that of the shown one first."""
        tokens = (self.token, self.second_token)
        return tuple(proof.derive_key(token, purpose) for token in tokens if token is not None)


NO_CREDENTIALS = Credentials()


class CredentialFiles:
    """The files of a process's credentials, read again when they change. For any thread."""

    def __init__(
        self, read_files: Callable[["CredentialFiles"], Credentials], paths: Sequence[str | None]
    ) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._read_files, self._paths = read_files, paths
        self._lock = threading.Lock()
        self._stamp = stamp_files(paths)
        self._latest = read_files(self)
        self._next_check_at = time.monotonic() + CHECK_S
        # why the files as they are now cannot be used, and the former ones are
        self.problem: str | None = None

    def current(self) -> Credentials:
        """Return the credentials; looks at the files at most every `CHECK_S` seconds."""
        with self._lock:
            if time.monotonic() >= self._next_check_at:
                self._next_check_at = time.monotonic() + CHECK_S
                stamp = stamp_files(self._paths)
                if stamp == self._stamp:
                    self.problem = None  # also if they were others meanwhile
                else:
                    try:
                        self._latest = self._read_files(self)
                    except errors.ConfigError as error:  # also between the writing of two files
                        self.problem = str(error)
                    else:
                        self.problem, self._stamp = None, stamp
        return self._latest


def stamp_files(paths: Iterable[str | None]) -> list[tuple[str, int, int, int]]:
    """Return what is other when one of these files has changed; a missing file counts, too."""
    stamp = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = Path(path or "").stat()
            stamp.append((path or "", status.st_ino, status.st_ctime_ns, status.st_size))
    return stamp


def read(settings: ClusterConfig, environ: Mapping[str, str]) -> Credentials:
    """Read the credentials that the settings and the environment name, or the local token. Raises ConfigError."""

    def read_files(files: CredentialFiles) -> Credentials:
        tokens = _tokens(settings.cluster_token_file, environ.get(TOKEN_VARIABLE))
        has_local_token = (
            not tokens and settings.discovery_backend == "file" and not settings.insecure
        )
        if has_local_token:
            tokens = [share_local_token(discovery_directory(settings.file_kv, environ))]
        return Credentials(
            token=tokens[0] if tokens else None,
            second_token=tokens[1] if len(tokens) > 1 else None,
            tls=_tls(settings),
            is_insecure=settings.insecure,
            is_local=has_local_token,
            files=files if paths else None,
        )

    paths = [
        settings.cluster_token_file,
        settings.cluster_tls_cert_path,
        settings.cluster_tls_key_path,
        settings.cluster_tls_ca_cert_path,
    ]
    paths = [path for path in paths if path]
    return CredentialFiles(read_files, paths).current()


def discovery_directory(file_kv: str | None, environ: Mapping[str, str]) -> Path:
    """Return `file_kv` or DYN_FILE_KV; else one in the user's runtime directory, or among temporary files."""
    if path := file_kv or environ.get("DYN_FILE_KV"):
        return Path(path).expanduser()
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "dynamo"
    return Path(tempfile.gettempdir()) / f"dynamo-{os.getuid()}"


def share_local_token(directory: Path, proposal: bytes | None = None) -> bytes:
    """Return the local token of a discovery directory, which is made if it is missing.

    `proposal` is the token to put there if none is. Raises ConfigError.
    """
    try:
        local_users.make_private_directory(directory)
        return local_users.share_secret(directory / _LOCAL_TOKEN, proposal)
    except OSError as error:
        raise errors.ConfigError(
            f"discovery directory {directory}: {error}; expected a directory that we can write and that has space:"
            " see to it, or set DYN_FILE_KV to another"
        ) from error


def is_loopback(host: str) -> bool:
    """Return True if only processes of this host can reach the address; of names, only `localhost` surely is one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, service: str, credentials: Credentials) -> None:
    """Raise ConfigError if processes outside the cluster could use `service` on this address."""
    is_protected = credentials.has_cluster_token or credentials.tls is not None
    if not (is_protected or credentials.is_insecure or is_loopback(host)):
        raise errors.ConfigError(
            f"{service} on {host} would be open to its whole network: give all processes a cluster token"
            " (--cluster-token-file) or certificates (--cluster-tls-cert-path), or say --insecure"
        )


def check_token_address(host: str, service: str, credentials: Credentials) -> None:
    """Raise ConfigError as `check_address` does, for a service that does not use TLS."""
    if not (credentials.has_cluster_token or credentials.is_insecure or is_loopback(host)):
        raise errors.ConfigError(
            f"{service} on {host} would be open to its whole network: give all processes a cluster token"
            " (--cluster-token-file; certificates do not cover it), or say --insecure"
        )


def _tokens(path: str | None, value: str | None) -> list[bytes]:
    if path and value:
        raise errors.ConfigError(
            f"--cluster-token-file and {TOKEN_VARIABLE}: expected one of them, got both"
        )
    if not path and not value:
        return []
    try:
        with Path(path or os.devnull).open("rb") as file:
            text = file.read(2 * MAX_TOKEN_BYTES + 4) or (value or "").encode()
    except OSError as error:
        raise errors.ConfigError(
            f"--cluster-token-file {path}: expected a file that this process may read: {error.strerror}"
        ) from error
    tokens = text.strip().splitlines() if path else [text.strip()]
    if len(tokens) > 2:
        raise errors.ConfigError(
            f"{path}: expected a cluster token, or two in two lines, got {len(tokens)}"
        )
    tokens = [token.strip() for token in tokens] or [b""]
    for token in tokens:
        if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:  # and its value is not repeated
            raise errors.ConfigError(
                f"{path or TOKEN_VARIABLE}: expected a cluster token of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes,"
                f" got {len(token)}; `openssl rand -hex 32` makes one"
            )
    return tokens


def _tls(settings: ClusterConfig) -> Tls | None:
    certificate, key = settings.cluster_tls_cert_path, settings.cluster_tls_key_path
    authority = settings.cluster_tls_ca_cert_path
    if not (certificate or key or authority):
        return None
    if certificate is None or key is None or authority is None:
        raise errors.ConfigError(
            "--cluster-tls-cert-path, --cluster-tls-key-path and --cluster-tls-ca-cert-path:"
            " expected all three or none"
        )
    return Tls(
        client=_context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority),
        server=_context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority),
        certificate=certificate,
        key=key,
        authority=authority,
    )


def _context(side: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """Accept any certificate of the cluster's authority, whatever its address, since workers come and go."""
    context = tls.AlertingContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key, tls.NO_PASSPHRASE)
        context.load_verify_locations(authority)
    except OSError as error:  # ssl's errors are of this class
        raise errors.ConfigError(
            f"--cluster-tls-…: expected PEM files, a key without a passphrase, in {certificate}, {key} and "
            f"{authority}: {error}"
        ) from error
    return context
