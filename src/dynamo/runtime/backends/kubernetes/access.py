"""Where the cluster's API is, and how this process proves who it is: kubeconfig files and service accounts.

The order is that of Kubernetes's own clients: the files that `KUBECONFIG` names, the service account of the pod, and
`~/.kube/config`. lightkube reads them: certificates, tokens (read again when the cluster says that they have ended) and
credential programs. What it asks for and does not find is said in one sentence (ConfigError).
"""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpcore2
import httpx2
import msgspec
import yaml
from lightkube.config import client_adapter, kubeconfig, models
from lightkube.core import exceptions

from dynamo.base import addresses, errors

SERVICE_ACCOUNT = pathlib.Path(kubeconfig.SERVICE_ACCOUNT)
_HOME_FILE = "~/.kube/config"
_LISTS = ("clusters", "contexts", "users")
_CONNECT_S = 5.0
_ANSWER_S = 30.0
_CONNECTIONS = httpx2.Limits(max_connections=200, max_keepalive_connections=20)
_UNUSABLE = (exceptions.ConfigError, OSError, LookupError, ValueError)
_ADVICE = "set KUBECONFIG to a kubeconfig file, or run in a pod with a service account"


def open_client(environ: Mapping[str, str] | None = None) -> tuple[httpx2.AsyncClient, str]:
    """Return a client for the cluster that this process belongs to, and its namespace. Raises ConfigError."""
    try:
        config = _config(os.environ if environ is None else environ)
        parameters = client_adapter.ConnectionParams(
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
        )
        options = parameters.httpx_params(config)
        if options["auth"] is not None:
            options["auth"] = _Credentials(options["auth"], config.cluster.server)
        client = httpx2.AsyncClient(limits=_CONNECTIONS, **options)
    except _UNUSABLE as error:
        raise _no_cluster(error) from error
    client._transport._pool._network_backend = _ClosingBackend()  # type: ignore[attr-defined]
    return client, config.namespace


class _Credentials(httpx2.Auth):
    """Raises Unavailable while the program or file of the kubeconfig gives no credentials, of which some end."""

    def __init__(self, given: httpx2.Auth, address: str) -> None:
        self._given, self._address = given, address

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        response: Any = None
        async with contextlib.aclosing(self._given.async_auth_flow(request)) as flow:
            while True:
                try:
                    following = await flow.asend(response)
                except StopAsyncIteration:
                    return
                except _UNUSABLE as error:
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    raise errors.Unavailable(
                        f"no credentials for the cluster at {self._address}: {reason}"
                    ) from error
                response = yield following


class _ClosingBackend(httpcore2.AnyIOBackend):
    """Closes a connection whose TLS handshake is cancelled, which httpcore2 2.16 leaves to the garbage collector."""

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        stream = await super().connect_tcp(*args, **options)
        start_tls = stream.start_tls

        async def start_tls_or_close(*args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
            try:
                return await start_tls(*args, **options)
            except asyncio.CancelledError:
                await stream.aclose()
                raise

        stream.start_tls = start_tls_or_close  # type: ignore[method-assign]
        return stream


def read_api_address(environ: Mapping[str, str]) -> str:
    """Return the host and port of the cluster's API. Raises ConfigError."""
    try:
        url = httpx2.URL(_config(environ).cluster.server)
    except _UNUSABLE as error:
        raise _no_cluster(error) from error
    return addresses.join(url.host, url.port or (443 if url.scheme == "https" else 80))


def _no_cluster(error: Exception) -> errors.ConfigError:
    reason = " ".join(str(error).split())
    return errors.ConfigError(f"no Kubernetes cluster is configured: {reason}; {_ADVICE}")


def _config(environ: Mapping[str, str]) -> kubeconfig.SingleConfig:
    files = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if files:
        file = _read(files)
    elif (SERVICE_ACCOUNT / "token").exists():
        file = kubeconfig.KubeConfig.from_service_account(SERVICE_ACCOUNT)
    else:
        file = _read([_HOME_FILE])
    config = file.get()
    if config is None:
        raise ValueError("the kubeconfig has no current-context")
    return config._replace(user=_user(config.user))


def _read(files: list[str]) -> kubeconfig.KubeConfig:
    """Merge kubeconfig files: of two entries with one name, the first holds."""
    paths = [path for name in files if (path := pathlib.Path(name).expanduser()).is_file()]
    if not paths:
        raise FileNotFoundError(f"there is no file {os.pathsep.join(files)}")
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            content = yaml.safe_load(path.read_bytes())
        except yaml.YAMLError as error:
            raise exceptions.ConfigError(f"{path}: {error}") from error
        if not isinstance(content, dict):
            raise exceptions.ConfigError(f"{path} is not a kubeconfig file")
        lists = {}
        for key in _LISTS:
            latest_first = reversed([*merged.get(key, ()), *(content.get(key) or ())])
            lists[key] = list({entry["name"]: entry for entry in latest_first}.values())
        merged = content | merged | lists
    return kubeconfig.KubeConfig.from_dict(merged, fname=paths[0])


def _user(user: models.User | None) -> models.User:
    """Return the user as lightkube takes it: it refuses credential programs of `v1`, which answer like `v1beta1`."""
    if user is None:
        return models.User()
    if user.exec is None:
        return user
    version = user.exec.apiVersion.replace("client.authentication.k8s.io/v1", "")
    if version:
        return user
    exec_ = msgspec.structs.replace(user.exec, apiVersion="client.authentication.k8s.io/v1beta1")
    return msgspec.structs.replace(user, exec=exec_)
