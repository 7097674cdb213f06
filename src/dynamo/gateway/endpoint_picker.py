"""`python -m dynamo.gateway.endpoint_picker`: the endpoint picker of the Gateway API Inference Extension.

A gateway sends each request here (external processing) and then to the pod that a header, and the metadata of the
answer, name. It may say in the metadata of a request among which pods there is to choose. The choice is that of
a frontend with a KV router, which is asked for the worker that it would take (`query_instance_id`). The pod has a
frontend of its own in direct mode, which finds the worker's id in a second header. Requests without a prompt, and
those in APIs that cannot ask for a worker, go to each pod in turn.
"""

import asyncio
import codecs
import functools
import itertools
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from dynamo.base import config, distribution, errors, process_setup, tasks
from dynamo.gateway import ext_proc_pb2 as messages
from dynamo.gateway import processor
from dynamo.observability import logs
from dynamo.runtime.http import client, encodings, exchange, parser
from dynamo.semantic import immediate, service

# The names that the extension's protocol gives to a header, to keys of metadata and to their namespaces.
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
NAMESPACE = "envoy.lb"
WORKER = "x-dynamo-worker-instance-id"
_ASKED_PATHS = ("/v1/chat/completions", "/v1/completions")
# The key decides what the client may ask, and the session which worker it gets.
_FORWARDED_HEADERS = ("authorization", "x-api-key", "x-dynamo-session-id")
_REFUSAL_HEADERS = ("retry-after", "x-should-retry")  # of the frontend, which the client gets
_PROG = "python -m dynamo.gateway.endpoint_picker"
_logger = logging.getLogger(__name__)
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPickerConfig:
    """Choose the worker's pod for each request of a gateway (InferencePool), by a frontend's KV router."""

    host: str = config.option("127.0.0.1", help="address to listen on")
    port: int = config.option(
        9002, help="port of external processing (gRPC); 0: any", least=0, most=65535
    )
    frontend: str = config.option(
        "127.0.0.1:8000",
        help="address or URL of a frontend with --router-mode kv, which is asked",
    )
    target_port: int = config.option(
        8000, help="port of the frontend in each worker's pod", least=1, most=65535
    )
    timeout_s: float = config.option(5.0, help="seconds for the frontend to answer", least=0.1)
    secure: bool = config.option(False, help="serve gRPC with TLS, as many gateways expect it")
    cert_path: str | None = config.option(
        None, help="directory of tls.crt and tls.key, for --secure"
    )
    body_limit_mb: int = config.option(64, help="largest body of a request, in MiB", least=1)


class FrontendQuestions:
    """Asks the frontend which worker it would choose, and where its workers are. Raises ConfigError for no address."""

    def __init__(self, settings: EndpointPickerConfig) -> None:
        self.settings = settings
        self.max_body_bytes = settings.body_limit_mb * 2**20
        address = settings.frontend
        self._url = (address if "//" in address else f"http://{address}").rstrip("/")
        try:
            client.split_url(self._url)
        except errors.ConfigError as error:
            raise errors.ConfigError(f"--frontend: {error}") from error
        self._turns = itertools.count()

    async def find_hosts(self, headers: Mapping[str, str]) -> dict[int, str]:
        """Return the hosts of the workers by instance id, which the client's key may see. Raises NoWorkers.

        Those that the frontend has lost and discovery still lists are left out, unless there are no others.
        """
        status, answer, _ = await self._ask("GET", "/health", b"", headers)
        try:
            found = json.loads(answer)["instances"]
            workers = [entry for entry in found if entry["endpoint"] == "generate"]
            ready = [entry for entry in workers if entry.get("state") != "down"]
            addresses_by_id = {
                entry["instance_id"]: str(next(iter(entry["transport"].values())))
                for entry in ready or workers
            }
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise errors.NoWorkers(
                f"the frontend lists no workers (HTTP {status}), or only to clients with an API key"
            ) from error
        return {
            number: address.rpartition("//")[2].rpartition(":")[0]
            for number, address in addresses_by_id.items()
        }

    async def choose_worker(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> int | immediate.ImmediateAnswer | None:
        """Return the worker for a request, None if any will do, or the frontend's refusal. Raises NoWorkers."""
        if path not in _ASKED_PATHS:
            return None
        try:
            if encoding := encodings.read_encoding(headers.get("content-encoding", "")):
                body = await encodings.inflate_apart(body, encoding, self.max_body_bytes)
            question = await exchange.decode_apart(body, _make_question)
        except (parser.RequestRefused, ValueError, TypeError, AttributeError, RecursionError):
            return None  # the frontend that gets the request says what is wrong with it
        status, answer, answer_headers = await self._ask("POST", path, question, headers)
        if status == 400:  # the question may be wrong as a stream, where the request is none
            return None
        if status != 200:
            kept = [
                (name, text) for name, text in answer_headers.items() if name in _REFUSAL_HEADERS
            ]
            return immediate.ImmediateAnswer(
                status=status, content_type="application/json", body=answer, headers=kept
            )
        lines = answer.decode("utf-8", "replace").splitlines()
        for name, text in itertools.pairwise(lines):
            if name == "event: worker_instance_id":
                return int(text.strip(': "'))
        raise errors.NoWorkers("the frontend names no worker: it needs --router-mode kv")

    def next_turn(self, size: int) -> int:
        """Return the next number below `size`, in turn."""
        return next(self._turns) % size

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send a request in the client's name, and return status, body and headers of the answer.

        Raises NoWorkers if the frontend does not answer.
        """
        forwarded = {name: headers[name] for name in _FORWARDED_HEADERS if name in headers}
        try:
            answer_headers: dict[str, str] = {}
            status, answer = await client.request(
                method,
                self._url + path,
                body,
                headers=forwarded,
                timeout_s=self.settings.timeout_s,
                response_headers=answer_headers,
            )
        except errors.Unavailable as error:
            raise errors.NoWorkers(f"the frontend did not answer: {error}") from error
        return status, answer, answer_headers


def _make_question(body: bytes) -> bytes:
    """Return the request as the question which worker would answer it. Raises ValueError, TypeError, AttributeError.

    All but `nvext` stays as it came: decoded, a large body takes many times its memory.
    """
    request = _decode_members(body.removeprefix(codecs.BOM_UTF8))
    extensions = dict(msgspec.json.decode(bytes(request.get("nvext", b"null"))) or {})
    annotations = [*(extensions.get("annotations") or ()), "query_instance_id"]
    nvext = {**extensions, "annotations": annotations}
    return msgspec.json.encode({**request, "stream": True, "nvext": nvext})


class PickingProcessor(processor.StreamProcessor):
    """Answers the messages of one stream with the pod that was chosen."""

    removed_headers = ()  # a semantic router before this process may have set them

    def __init__(self, questions: FrontendQuestions) -> None:
        # no semantic routing
        super().__init__(cast("service.RoutingService", None), questions.max_body_bytes)
        self._questions = questions
        self._allowed: frozenset[str] | None = None  # endpoints to choose from; None: all
        self._target = ""  # that was chosen and is not yet told

    async def process(self, message: Any) -> list[Any]:
        """Return the answers to a message of Envoy, in order."""
        answers = await super().process(message)
        if message.WhichOneof("request") == "request_headers":
            self._allowed = _read_subset(message.metadata_context)
            if message.request_headers.end_of_stream or not self.reads_body:
                answers = [await self._answer_without_body()]
        if self._target:
            answers[0].dynamic_metadata.update({NAMESPACE: {DESTINATION: self._target}})
            self._target = ""
        return answers

    async def _answer_without_body(self) -> Any:
        changed = await self._change_request(b"")
        if isinstance(changed, immediate.ImmediateAnswer):
            return processor.respond_at_once(changed)
        head = messages.HeadersResponse(response=changed[0])
        return messages.ProcessingResponse(request_headers=head)

    @property
    def reads_body(self) -> bool:
        """Return whether the body of the request has a prompt that the frontend is asked about."""
        is_asked = self.path in _ASKED_PATHS and self.headers.get(":method") == "POST"
        return is_asked and not self._unusable_mode

    def _answer_head(self, *, has_body: bool) -> None:
        """Return no answer: the frontend in the pod lists the models."""
        if has_body and self._unusable_mode:
            _logger.warning(
                "a request goes to any pod: expected BUFFERED or FULL_DUPLEX_STREAMED as Envoy's request_body_mode, "
                "got %s",
                self._unusable_mode,
            )

    async def _change_request(self, body: bytes) -> tuple[Any, bytes] | immediate.ImmediateAnswer:
        try:
            chosen = await self._questions.choose_worker(self.path, body, self.headers)
            if isinstance(chosen, immediate.ImmediateAnswer):
                return chosen
            targets = await self._find_targets()
            ids = sorted(targets)
            number = chosen if chosen in targets else ids[self._questions.next_turn(len(ids))]
        except errors.NoWorkers as error:
            _logger.info("no endpoint for a request: %s", error)
            retry = [("retry-after", str(max(1, math.ceil(error.retry_after_s))))]
            return immediate.refuse(503, str(error), "service_unavailable", headers=retry)
        self._target = targets[number]
        headers = [(DESTINATION, self._target), (WORKER, str(number))]
        changes = messages.CommonResponse(
            header_mutation=processor.make_mutation(headers), clear_route_cache=True
        )
        return changes, body

    async def _find_targets(self) -> dict[int, str]:
        """Return the endpoints among which there is to choose, by instance id. Raises NoWorkers."""
        hosts = await self._questions.find_hosts(self.headers)
        if not hosts:
            raise errors.NoWorkers("there is no worker: start one")
        port = self._questions.settings.target_port
        targets = {number: f"{host}:{port}" for number, host in hosts.items()}
        if self._allowed is None:
            return targets
        allowed = {number: each for number, each in targets.items() if each in self._allowed}
        if not allowed:
            _logger.warning(
                "the gateway lets one choose among %s, and workers are at %s",
                ", ".join(sorted(self._allowed)) or "no endpoints",
                ", ".join(sorted(targets.values())),
            )
            raise errors.NoWorkers("no worker is at an endpoint that the gateway allows")
        return allowed


def _read_subset(metadata: Any) -> frozenset[str] | None:
    """Return the endpoints among which the gateway lets one choose; None: all."""
    namespaces = metadata.filter_metadata
    fields: Any = namespaces[SUBSET_NAMESPACE].fields if SUBSET_NAMESPACE in namespaces else {}
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    texts = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return frozenset(filter(None, map(str.strip, texts)))


def main() -> int:
    """Run the process and return its exit status."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    asyncio.run(serve(config.load(EndpointPickerConfig, prog=_PROG)))


async def serve(settings: EndpointPickerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    module = distribution.load_extra("dynamo.gateway.server", feature=_PROG, extra="gateway")
    read_certificates = functools.partial(
        module.read_certificates, is_secure=settings.secure, directory=settings.cert_path
    )
    questions = FrontendQuestions(settings)
    picker = module.ExtProcServer(lambda: PickingProcessor(questions), questions.max_body_bytes)
    stop = process_setup.stop_on_signals()
    running = tasks.Tasks()
    await picker.start(settings.host, settings.port, read_certificates)
    try:
        await running.run_until(stop)
    finally:
        await picker.stop(2.0)


if __name__ == "__main__":
    sys.exit(main())
