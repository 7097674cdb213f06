"""The webhooks of the operator: their HTTPS server, its certificate, and their registration with the API server.

The certificate is self-signed and lies in a Secret, which all operators of a release share; it is renewed before it
ends, and the API server trusts the new one beside the old one before any operator presents it. v1beta1 is served as
long as a webhook can convert it: the definition is changed when one can be reached, and changed again when an
installation sets it back. It is restored by `--remove-webhooks` after an uninstallation, and when an operator is
stopped at an address of its own; behind a Service, and after an error, another one or a restart goes on.
"""

import asyncio
import base64
import functools
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tls
from dynamo.observability import metrics
from dynamo.operator import api_types, objects, reviews, versions
from dynamo.operator.objects import Object
from dynamo.operator.settings import OperatorConfig, parse_address
from dynamo.protocols import wire
from dynamo.runtime.backends.kubernetes import connection
from dynamo.runtime.http import exchange, parser, server

_DEFINITION = f"dynamographdeployments.{api_types.GROUP}"
_CRD = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")
_ADMISSION = "admissionregistration.k8s.io/v1"
_RENEW_ANNOTATION = f"{api_types.GROUP}/renew-after"
_LIFETIME_DAYS, _RENEW_DAYS, _DAY_S = 90, 60, 86_400
_CHECK_S = 600.0  # between two looks at the certificate
_WAIT_S = 1.0  # between two looks whether the Service has an endpoint
_MAX_BODY_BYTES = 64 * 2**20  # a list of deployments is converted in one request
_logger = logging.getLogger(__name__)
R = TypeVar("R", reviews.ConversionReview, reviews.AdmissionReview)


class WebhookMetrics:
    """The metrics of the webhooks, named as the original's."""

    def __init__(self, registry: metrics.Registry) -> None:
        labels = ("webhook",)
        self._duration = registry.histogram(
            "webhook_duration_seconds",
            "seconds of one review",
            labels,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
        )
        self._total = registry.counter("webhook_requests_total", "reviews", labels)
        self._denials = registry.counter(
            "webhook_denials_total", "reviews that refused their objects", labels
        )
        for name in ("convert", "default", "validate"):
            self._total.labels(name)
            self._denials.labels(name)

    def record(self, webhook: str, duration_s: float, answer: Object) -> None:
        """Count a review by its answer."""
        response = answer["response"]
        self._total.labels(webhook).inc()
        self._duration.labels(webhook).observe(duration_s)
        if not response.get("allowed", response.get("result", {}).get("status") == "Success"):
            self._denials.labels(webhook).inc()


class WebhookService:
    """Serves the webhooks of one operator process."""

    def __init__(
        self,
        cluster: connection.KubernetesConnection,
        settings: OperatorConfig,
        clock: clocks.Clock,
        registry: metrics.Registry | None = None,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._namespace = settings.lease_namespace or cluster.namespace
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._certificate = self._bundle = b""
        self._address = ""  # host and port
        self._has_certificate = asyncio.Event()
        validate = functools.partial(reviews.answer_validation, settings=settings)
        self._metrics = WebhookMetrics(registry or metrics.Registry("dynamo_operator"))
        convert, default = reviews.answer_conversion, reviews.answer_defaulting
        routes = {
            ("POST", "/convert"): self._make_route("convert", reviews.ConversionReview, convert),
            ("POST", "/validate"): self._make_route("validate", reviews.AdmissionReview, validate),
            ("POST", "/default"): self._make_route("default", reviews.AdmissionReview, default),
        }
        self._server = server.HttpServer(
            exchange.HttpRouter(routes, error_body=server.plain_error),
            limits=parser.HttpLimits(body_bytes=_MAX_BODY_BYTES),
            tls=self._context,
            error_body=server.plain_error,
        )

    def _make_route(
        self, name: str, kind: type[R], answer: Callable[[R], Object]
    ) -> exchange.Handler:
        """Return the handler that answers reviews of a kind; one that cannot be read is refused."""

        def handle(request: exchange.Exchange) -> None:
            started_at = self._clock.now()
            try:
                review = msgspec.json.decode(request.request.body, type=kind)
            except wire.DECODE_ERRORS as error:
                text = f"the body is no {kind.__name__}: {error}"
                request.respond(400, text.encode(), content_type="text/plain")
                return
            answered = answer(review)
            self._metrics.record(name, self._clock.now() - started_at, answered)
            request.respond(200, msgspec.json.encode(answered))

        return handle

    @property
    def is_ready(self) -> bool:
        """Return True when webhooks can be called."""
        return self._has_certificate.is_set()

    async def start(self) -> None:
        """Listen; handshakes fail until `keep_certificate` has a certificate. Raises ConfigError."""
        flag = "--webhook-bind-address"
        host, port = parse_address(self._settings.webhook_bind_address, flag)
        self._address = f"{host}:{await self._server.start(host, port, port_flag=flag)}"

    async def keep_registered(self) -> None:
        """Tell the API server of the webhooks, and again when it has forgotten them. For the operator that leads."""
        await self._has_certificate.wait()
        while True:
            try:
                await self._wait_for_endpoint()
                await self._register_admission()
                async for event, definition in self._cluster.watch(
                    *_CRD, fields=f"metadata.name={_DEFINITION}"
                ):
                    if event in ("ADDED", "MODIFIED"):
                        await self._load_certificate()  # another operator may have renewed it
                        await self._change_definition(definition, is_served=True)
            except (errors.Unavailable, errors.Conflict, errors.ConfigError) as error:
                _logger.warning("the webhooks are to be registered: %s", error)
                await self._clock.sleep(_WAIT_S)

    async def keep_certificate(self) -> None:
        """Present a certificate, renew it before it ends, and present one that another operator has renewed.

        The first one is waited for while the cluster does not answer; other errors of it are raised.
        """
        while not self.is_ready:
            try:
                await self._load_certificate()
                self._has_certificate.set()
            except errors.Unavailable as error:
                _logger.warning("the webhooks have no certificate yet: %s", error)
                await self._clock.sleep(_WAIT_S)
        while True:
            await self._clock.sleep(_CHECK_S)
            try:
                await self._load_certificate()
                await self._register_admission()
            except errors.DynamoError as error:
                _logger.warning("the certificate of the webhooks is not renewed: %s", error)

    async def end_serving(self) -> None:
        """Have v1beta1 served no longer. Raises Conflict, Forbidden and Unavailable."""
        definition = await self._cluster.get(*_CRD, _DEFINITION)
        if definition is not None:
            await self._change_definition(definition, is_served=False)

    async def close(self, *, is_stopped: bool) -> None:
        """Stop listening; an operator that is stopped at an address of its own has v1beta1 served no longer.

        An operator that another has succeeded leaves the definition alone: it names the other's address.
        """
        try:
            if is_stopped and not self._settings.webhook_service:
                definition = await self._cluster.get(*_CRD, _DEFINITION)
                if definition is not None and self._is_named_in(definition):
                    await self._change_definition(definition, is_served=False)
        except errors.DynamoError as error:
            _logger.warning("%s goes on to be served: %s", versions.BETA_VERSION, error)
        await self._server.close()

    async def _wait_for_endpoint(self) -> None:
        """Return when the API server can reach an operator through the Service."""
        namespace, _, name = self._settings.webhook_service.partition("/")
        labels = f"kubernetes.io/service-name={name}"
        while name:
            slices = await self._cluster.list(
                "discovery.k8s.io/v1", "EndpointSlice", namespace, labels=labels
            )
            endpoints = [entry for item in slices for entry in item.get("endpoints") or ()]
            if any((entry.get("conditions") or {}).get("ready") for entry in endpoints):
                return
            await self._clock.sleep(_WAIT_S)

    # The certificate.

    async def _load_certificate(self) -> None:
        """Present the present certificate; the API server is told first if there was another.

        Raises ConfigError for a folder that is read in the middle of a rotation; the former one is presented then.
        """
        folder = self._settings.webhook_certificate_dir
        content = _read_folder(Path(folder)) if folder else await self._read_secret()
        if content["tls.crt"] == self._certificate:
            return
        certificate = tls.ServerCertificate(content["tls.crt"], content["tls.key"])
        certificate.open_context()  # half a rotation must not replace the key that is in use
        self._bundle = content["ca.crt"]
        if self._certificate:
            await self._register_admission()
            definition = await self._cluster.get(*_CRD, _DEFINITION)
            if definition is not None:
                await self._change_definition(definition, is_served=True)
        certificate.load_into(self._context)
        self._certificate = content["tls.crt"]

    async def _read_secret(self) -> dict[str, bytes]:
        """Return the content of the Secret, which is made or renewed if need be."""
        name = f"{self._settings.webhook_name}-webhook-certificate"
        while True:
            secret = await self._cluster.get("v1", "Secret", name, self._namespace)
            annotations = (secret or {}).get("metadata", {}).get("annotations") or {}
            content = {
                key: base64.b64decode(value)
                for key, value in ((secret or {}).get("data") or {}).items()
            }
            if annotations.get(_RENEW_ANNOTATION, "") > objects.format_time(self._clock.wall()):
                return content
            made = await tls.make_certificate(self._names(), days=_LIFETIME_DAYS)
            content = {
                "tls.crt": made.certificate,
                "tls.key": made.key,
                "ca.crt": made.certificate + content.get("tls.crt", b""),
            }
            renew_at = objects.format_time(self._clock.wall() + _RENEW_DAYS * _DAY_S)
            metadata: Object = {"annotations": {_RENEW_ANNOTATION: renew_at}}
            data = {key: base64.b64encode(value).decode() for key, value in content.items()}
            try:
                if secret is None:
                    metadata |= {"name": name, "namespace": self._namespace}
                    head = {"apiVersion": "v1", "kind": "Secret"}
                    await self._cluster.create({**head, "metadata": metadata, "data": data})
                else:
                    metadata["resourceVersion"] = secret["metadata"]["resourceVersion"]
                    changes = {"metadata": metadata, "data": data}
                    await self._cluster.patch("v1", "Secret", name, changes, self._namespace)
            except errors.Conflict:  # another operator was quicker: take its certificate
                continue
            _logger.info("the webhooks have a new certificate, for %s days", _LIFETIME_DAYS)
            return content

    def _names(self) -> list[str]:
        namespace, _, name = self._settings.webhook_service.partition("/")
        return [f"{name}.{namespace}.svc"] if name else [self._address.rpartition(":")[0]]

    # Registration.

    def _client_config(self, path: str) -> Object:
        config: Object = {"caBundle": base64.b64encode(self._bundle).decode()}
        namespace, _, name = self._settings.webhook_service.partition("/")
        if name:
            service = {"namespace": namespace, "name": name, "path": path, "port": 443}
            return {**config, "service": service}
        return {**config, "url": f"https://{self._address}{path}"}

    async def _register_admission(self) -> None:
        for configuration in make_configurations(self._settings, self._client_config):
            await self._cluster.apply(configuration, objects.FIELD_MANAGER, force=True)

    def _is_named_in(self, definition: Object) -> bool:
        """Return True if the API server converts by the webhook of this very operator."""
        webhook = (definition["spec"].get("conversion") or {}).get("webhook") or {}
        config = webhook.get("clientConfig") or {}
        return bool(config.get("url") == self._client_config("/convert")["url"])

    async def _change_definition(self, definition: Object, *, is_served: bool) -> None:
        """Have v1beta1 served, and converted by this webhook, or not any longer. Raises Conflict."""
        spec = definition["spec"]
        if versions.BETA_VERSION not in [version["name"] for version in spec["versions"]]:
            return  # an older definition, until it is upgraded
        conversion: Object = {"strategy": "None", "webhook": None}
        if is_served:
            webhook = {
                "conversionReviewVersions": ["v1"],
                "clientConfig": self._client_config("/convert"),
            }
            conversion = {"strategy": "Webhook", "webhook": webhook}
        listed = [
            {**version, "served": is_served}
            if version["name"] == versions.BETA_VERSION
            else version
            for version in spec["versions"]
        ]
        is_same = (spec.get("conversion") or {}).get("webhook") == conversion["webhook"]
        if is_same and listed == spec["versions"]:
            return
        metadata = {"resourceVersion": definition["metadata"]["resourceVersion"]}
        changes = {"metadata": metadata, "spec": {"conversion": conversion, "versions": listed}}
        await self._cluster.patch(*_CRD, _DEFINITION, changes)
        _logger.info("%s is %sserved", versions.BETA_API_VERSION, "" if is_served else "no longer ")


def make_configurations(
    settings: OperatorConfig, client_config: Callable[[str], Object]
) -> list[Object]:
    """Return the configurations of the admission webhooks, as the chart has them too."""
    rule = {
        "apiGroups": [api_types.GROUP],
        "apiVersions": [api_types.VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["dynamographdeployments"],
        "scope": "Namespaced",
    }
    configurations = []
    for kind, name, path in (
        ("Mutating", "default", "/default"),
        ("Validating", "validate", "/validate"),
    ):
        webhook = {
            "name": f"{name}.dynamographdeployments.{api_types.GROUP}",
            "clientConfig": client_config(path),
            "rules": [rule],
            "failurePolicy": "Ignore",  # the status says what was not checked here
            "matchPolicy": "Equivalent",
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "admissionReviewVersions": ["v1"],
        }
        configurations.append(
            {
                "apiVersion": _ADMISSION,
                "kind": f"{kind}WebhookConfiguration",
                "metadata": {"name": settings.webhook_name},
                "webhooks": [webhook],
            }
        )
    return configurations


def _read_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")}
    except OSError as error:
        raise errors.ConfigError(f"--webhook-certificate-dir {folder}: {error}") from error
