"""A token and certificates for what is measured, the same in all processes of a benchmark."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dynamo.base import config, membership

WAYS = ("open", "token", "tls", "both")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """The processes that start within this find them by the environment."""
    with tempfile.TemporaryDirectory() as folder:
        _make(Path(folder), "authority")
        _make(Path(folder), "member", "-CA", "authority.pem", "-CAkey", "authority.key")
        os.environ |= {
            "DYN_CLUSTER_TOKEN": os.urandom(32).hex(),
            "DYN_CLUSTER_TLS_CERT_PATH": f"{folder}/member.pem",
            "DYN_CLUSTER_TLS_KEY_PATH": f"{folder}/member.key",
            "DYN_CLUSTER_TLS_CA_CERT_PATH": f"{folder}/authority.pem",
        }
        yield


def of(way: str) -> membership.Credentials:
    """One of WAYS."""
    if way == "open":
        return membership.NO_CREDENTIALS
    settings = config.load(membership.ClusterConfig, prog="benchmark", argv=())
    both = membership.read(settings, os.environ)
    return membership.Credentials(
        token=None if way == "tls" else both.token, tls=None if way == "token" else both.tls
    )


def _make(folder: Path, name: str, *flags: str) -> None:
    paths = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    command = ("openssl", "req", "-x509", *_KEY, *paths, *flags)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
