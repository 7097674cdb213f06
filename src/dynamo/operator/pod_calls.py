"""What the operator asks of pods over HTTP: which instances a frontend lists, and which adapters a worker has."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.base import addresses, errors
from dynamo.operator import objects
from dynamo.operator.objects import Object, Start
from dynamo.operator.pod_template import HTTP_PORT
from dynamo.runtime.http import client

_HTTP_TIMEOUT_S = 3.0
_FRONTEND_TIMEOUT_S = 10.0  # an update waits for frontends, on a busy machine too
_MOST_BYTES = 4 * 2**20
_ENDPOINTS = ("generate", "embed")  # of workers
_logger = logging.getLogger(__name__)


async def call_pod(
    address: str,
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout_s: float = _HTTP_TIMEOUT_S,
) -> tuple[int, Any]:
    """Send a request and return the status and the decoded answer. Raises Unavailable."""
    url = f"http://{addresses.join(address, port)}{path}"
    content = b"" if body is None else msgspec.json.encode(body)
    status, answer = await client.request(
        method, url, content, timeout_s=timeout_s, max_bytes=_MOST_BYTES
    )
    try:
        return status, msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.Unavailable(f"{url}: expected JSON: {error}") from error


async def count_admitted(pods: Sequence[Object], heard: set[str]) -> dict[str, int] | None:
    """Return how many instances of each namespace all ready frontends have admitted; None if none can say.

    `heard` has the uids of the pods that have answered before, and gets those that answer now. One of them that does
    not answer now is slow, and may not have admitted anything; others cannot be asked, and do not hold up an update.
    """
    address_by_uid = {
        pod["metadata"]["uid"]: pod["status"]["podIP"]
        for pod in pods
        if pod["metadata"]["labels"].get(objects.TYPE_LABEL) == "frontend"
        and objects.is_ready(pod)
        and pod["status"].get("podIP")
    }
    answers = await asyncio.gather(*(read_instances(each) for each in address_by_uid.values()))
    count_by_uid = dict(zip(address_by_uid, answers, strict=True))
    heard.update(uid for uid, count in count_by_uid.items() if count is not None)
    counts = [count or {} for uid, count in count_by_uid.items() if uid in heard]
    if not counts:
        return None
    names = {name for count in counts for name in count}
    return {name: min(count.get(name, 0) for count in counts) for name in names}


async def read_instances(address: str, port: int = HTTP_PORT) -> dict[str, int] | None:
    """Return how many instances a frontend can reach in each dynamo namespace; None if it cannot be asked."""
    counts: dict[str, int] = {}
    try:
        _, answer = await call_pod(address, port, "GET", "/health", timeout_s=_FRONTEND_TIMEOUT_S)
        for entry in answer["instances"]:
            if entry["endpoint"] in _ENDPOINTS and entry.get("state") != "down":
                counts[entry["namespace"]] = counts.get(entry["namespace"], 0) + 1
    except (errors.DynamoError, LookupError, TypeError) as error:
        _logger.info("the frontend at %s does not tell its instances: %s", address, error)
        return None
    return counts


async def read_starts(workers: Mapping[str, tuple[str, int]]) -> dict[str, Start]:
    """Return how far the starts of workers are, by the names of their pods; a worker that cannot say is left out."""
    answers = await asyncio.gather(*(_read_start(*address) for address in workers.values()))
    return {name: answer for name, answer in zip(workers, answers, strict=True) if answer}


async def _read_start(address: str, port: int) -> Start | None:
    try:
        _, answer = await call_pod(address, port, "GET", "/health")
        return msgspec.convert(answer["startup"], Start)
    except (errors.DynamoError, LookupError, TypeError, msgspec.ValidationError):
        return None


async def change_adapter(address: str, port: int, name: str, uri: str | None) -> str:
    """Have a worker load a LoRA adapter from `uri`, or unload it for None; return why that is not done, empty if it is.

    A load that takes longer than a call goes on in the worker, and the next call finds its result.
    """
    method, path, body = "DELETE", f"/v1/loras/{quote(name, safe='')}", None
    if uri is not None:
        method, path, body = "POST", "/v1/loras", {"lora_name": name, "source": {"uri": uri}}
    try:
        code, answer = await call_pod(address, port, method, path, body)
        if code == 200 or (code == 404 and uri is None):
            return ""
        return str(answer["error"]["message"])
    except (errors.Unavailable, LookupError, TypeError) as error:
        return str(error)
