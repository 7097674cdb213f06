"""Cluster tokens and certificates for tests: of members, and of peers outside the cluster."""

import pathlib
import subprocess

from dynamo.base import membership

TOKEN = "a secret of the cluster, for tests"
KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


def with_token(token: str = TOKEN) -> membership.Credentials:
    return membership.read(
        membership.ClusterConfig(discovery_backend="mem"), {membership.TOKEN_VARIABLE: token}
    )


def make_certificates(folder: pathlib.Path) -> None:
    """Make certificates as docs/security.md does: an authority, a member, and a peer of another authority.

    And `expired`, a member whose certificate has expired, and `of-past`, one of an authority that has: `past`.
    """

    def make(name: str, *flags: str) -> None:
        paths = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        command = ["openssl", "req", "-x509", *KEY, *paths, *flags]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    for authority, name in (("authority", "member"), ("other", "stranger")):
        make(authority)
        make(name, "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key")

    def make_expired(name: str, *signing: str) -> None:
        request = ["-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
        extensions = ["-addext", "basicConstraints=CA:TRUE"]
        for command in (
            ["openssl", "req", "-new", *KEY[:-2], *request, *extensions],
            ["openssl", "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "-1",
             "-copy_extensions", "copy", *signing],
        ):  # fmt: skip
            subprocess.run(command, cwd=folder, check=True, capture_output=True)

    make_expired("expired", "-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial")
    make_expired("past", "-signkey", "past.key")
    make("of-past", "-CA", "past.pem", "-CAkey", "past.key")


def flags(folder: pathlib.Path, name: str = "member", authority: str = "authority") -> dict:
    """Return the settings of a process with these certificates."""
    return {
        "cluster_tls_cert_path": str(folder / f"{name}.pem"),
        "cluster_tls_key_path": str(folder / f"{name}.key"),
        "cluster_tls_ca_cert_path": str(folder / f"{authority}.pem"),
    }


def with_tls(
    folder: pathlib.Path, *, token: str | None = None, **names: str
) -> membership.Credentials:
    environ = {} if token is None else {membership.TOKEN_VARIABLE: token}
    return membership.read(
        membership.ClusterConfig(discovery_backend="mem", **flags(folder, **names)), environ
    )
