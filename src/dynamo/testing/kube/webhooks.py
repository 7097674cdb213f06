"""Calls of the API server to webhooks, by HTTPS, and the conversion of custom resources between versions by them.

A webhook is found by its URL, or as a ready endpoint of a Service. Its certificate is verified against the caBundle of
the configuration that names it. Every failure has the words of a real API server.
"""

import asyncio
import base64
import binascii
import json
import re
import ssl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2

from dynamo.testing.kube import failures, resources, rules, store

Object = dict[str, Any]
_SERVICES, _SLICES = ("", "services"), ("discovery.k8s.io", "endpointslices")
_SERVICE_LABEL = "kubernetes.io/service-name"
_CONVERSION_S = 30.0
_ANSWER_TEXTS = {404: "the server could not find the requested resource"}


class WebhookCallFailed(Exception):
    """A webhook that could not be reached, or did not answer as its API demands."""


class WebhookClient:
    """Calls the webhooks of one cluster."""

    def __init__(self, objects: store.Store) -> None:
        self._objects = objects

    async def call(
        self, config: Mapping[str, Any], review: Object, *, timeout_s: float = _CONVERSION_S
    ) -> Object:
        """Send a review to the webhook of a clientConfig; return its whole answer. Raises WebhookCallFailed."""
        service = config.get("service")
        if service is None:
            url = shown_url = str(config["url"])
            name = urlsplit(url).hostname or ""
        else:
            name = f"{service['name']}.{service['namespace']}.svc"
            path = "/" + (service.get("path") or "").lstrip("/")
            shown_url = f"https://{name}:{service.get('port', 443)}{path}"
        shown_url += f"?timeout={timeout_s:g}s"
        if service is not None:
            try:
                url = f"https://{self._find_endpoint(service)}{path}"
            except LookupError as error:
                raise WebhookCallFailed(f'Post "{shown_url}": {error.args[0]}') from error
        try:
            context = _make_context(config.get("caBundle") or "")
            async with (
                asyncio.timeout(timeout_s),
                httpx2.AsyncClient(verify=context, timeout=None, trust_env=False) as client,
            ):
                answer = await client.post(
                    url,
                    params={"timeout": f"{timeout_s:g}s"},
                    json=review,
                    headers={"host": urlsplit(shown_url).netloc, "user-agent": "kube-apiserver-admission"},
                    extensions={"sni_hostname": name},
                )  # fmt: skip
        except (TimeoutError, httpx2.HTTPError) as error:
            text = _describe_failure(error, url, name)
            raise WebhookCallFailed(f'Post "{shown_url}": {text}') from error
        if answer.status_code != 200:
            text = 'an error on the server ("unknown") has prevented the request from succeeding'
            raise WebhookCallFailed(_ANSWER_TEXTS.get(answer.status_code, text))
        try:
            body = answer.json()
        except ValueError as error:
            text = f"couldn't get version/kind; json parse error: {error}"
            raise WebhookCallFailed(text) from error
        if not isinstance(body, dict):
            text = (
                "couldn't get version/kind; json parse error: json: cannot unmarshal string into Go value of type"
                ' struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string'
                ' "json:\\"kind,omitempty\\"" }'
            )
            raise WebhookCallFailed(text)
        return body

    async def convert(
        self, resource: resources.ApiResource, items: Sequence[Object]
    ) -> list[Object]:
        """Return objects of one stored version in the version of the resource. Raises ApiError (500)."""
        identity = str(uuid.uuid4())
        review = {
            "kind": "ConversionReview",
            "apiVersion": "apiextensions.k8s.io/v1",
            "request": {
                "uid": identity,
                "desiredAPIVersion": resource.api_version,
                "objects": [{**item, "metadata": _without_version(item)} for item in items],
            },
            "response": {"uid": "", "convertedObjects": None, "result": {"metadata": {}}},
        }
        source = f"{items[0]['apiVersion']}, Kind={resource.kind}"
        problem, answer = "", dict[str, Any]()
        try:
            answer = (await self.call(resource.conversion, review)).get("response") or {}
        except WebhookCallFailed as error:
            problem = str(error)
        result = answer.get("result") or {}
        if not problem and answer.get("uid") != identity:
            problem = f'expected response.uid="{identity}", got "{answer.get("uid", "")}"'
        elif not problem and result.get("status") != "Success":
            problem = result.get("message") or ""
        if problem or result.get("status") != "Success":
            text = f"conversion webhook for {source} failed: {problem}"
            raise failures.ApiError(500, "", text)
        converted = answer.get("convertedObjects") or []
        if len(converted) != len(items):
            text = f"returned {len(converted)} objects, expected {len(items)}"
            raise failures.ApiError(500, "", f"conversion webhook for {source} {text}")
        return [
            _check_converted(before, after, source)
            for before, after in zip(items, converted, strict=True)
        ]

    def _find_endpoint(self, service: Mapping[str, Any]) -> str:
        """Return host and port of a ready pod behind a Service. Raises LookupError."""
        namespace, name = service["namespace"], service["name"]
        found = self._objects.get(_SERVICES, (namespace, name))
        if found is None:
            raise LookupError(f'service "{name}" not found')
        port_names = {port["port"]: port.get("name", "") for port in found["spec"].get("ports", ())}
        port_name = port_names.get(service.get("port", 443))
        for item in self._objects.list_items(_SLICES, namespace):
            if (item["metadata"].get("labels") or {}).get(_SERVICE_LABEL) == name:
                for port in item["ports"]:
                    for endpoint in item["endpoints"] if port.get("name") == port_name else ():
                        if endpoint["conditions"].get("ready"):
                            return f"{endpoint['addresses'][0]}:{port['port']}"
        raise LookupError(f'no endpoints available for service "{name}"')


def _without_version(item: Object) -> Object:
    return {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}


def _check_converted(before: Object, after: Object, source: str) -> Object:
    """Return an object with the metadata that a conversion may not change. Raises ApiError (500)."""
    old, new = before["metadata"], after.get("metadata") or {}
    if new.get("name") != old["name"]:
        text = (
            f"returned invalid object: must have the same name: {old['name']} != {new.get('name')}"
        )
        raise failures.ApiError(500, "", f"conversion webhook for {source} {text}")
    changeable = {key: new[key] for key in ("labels", "annotations") if key in new}
    kept = {key: value for key, value in old.items() if key not in ("labels", "annotations")}
    return {**after, "metadata": {**kept, **changeable}}


def fill_configuration(item: Object) -> None:
    """Fill in the defaults of a webhook configuration."""
    for webhook in item.get("webhooks") or ():
        defaults: Object = {
            "failurePolicy": "Fail",
            "matchPolicy": "Equivalent",
            "namespaceSelector": {},
        }
        defaults |= {"objectSelector": {}, "timeoutSeconds": 10}
        if item["kind"] == "MutatingWebhookConfiguration":
            defaults["reinvocationPolicy"] = "Never"
        for name, value in defaults.items():
            webhook.setdefault(name, value)
        if service := (webhook.get("clientConfig") or {}).get("service"):
            service.setdefault("port", 443)
        for rule in webhook.get("rules") or ():
            rule.setdefault("scope", "*")


def check_configuration(item: Object) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a webhook configuration."""
    for n, webhook in enumerate(item.get("webhooks") or ()):
        path = f"webhooks[{n}]"
        name = webhook.get("name") or ""
        if name.count(".") < 2:
            text = "should be a domain with at least three segments separated by dots"
            yield failures.invalid_value(f"{path}.name", json.dumps(name), text)
        if not webhook.get("sideEffects"):
            text = "must specify one of None, NoneOnDryRun"
            yield failures.required(f"{path}.sideEffects", text)
        yield from _check_url(webhook.get("clientConfig") or {}, f"{path}.clientConfig")
        if not webhook.get("admissionReviewVersions"):
            text = "must specify one of v1, v1beta1"
            yield failures.required(f"{path}.admissionReviewVersions", text)
        for m, condition in enumerate(webhook.get("matchConditions") or ()):
            field = f"{path}.matchConditions[{m}].expression"
            yield from rules.check_expression(condition["expression"], field)


def check_conversion(spec: Object) -> Iterator[failures.FieldError]:
    """Yield the mistakes in the conversion webhook of a definition."""
    webhook = (spec.get("conversion") or {}).get("webhook") or {}
    config, path = webhook.get("clientConfig") or {}, "spec.conversion.webhookClientConfig"
    yield from _check_url(config, path)
    if config.get("caBundle"):
        try:
            _make_context(config["caBundle"])
        except WebhookCallFailed as error:
            yield failures.invalid_value(
                f"{path}.caBundle", json.dumps(config["caBundle"]), str(error)
            )


def _check_url(config: Mapping[str, Any], path: str) -> Iterator[failures.FieldError]:
    scheme = urlsplit(config.get("url") or "https://").scheme
    if scheme != "https":
        text = "'https' is the only allowed URL scheme; desired format: https://host[/path]"
        yield failures.invalid_value(f"{path}.url", json.dumps(scheme), text)


def _make_context(bundle: str) -> ssl.SSLContext:
    if not bundle:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    except (ssl.SSLError, binascii.Error, UnicodeDecodeError) as error:
        text = "unable to load root certificates: unable to parse bytes as PEM block"
        raise WebhookCallFailed(text) from error


def _describe_failure(error: Exception, url: str, name: str) -> str:
    """Return what Go's HTTP client says of a failed connection."""
    text = str(error)
    if isinstance(error, TimeoutError):
        return "context deadline exceeded"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        prefix = "tls: failed to verify certificate: x509: "
        if "mismatch" not in text:
            return f"{prefix}certificate signed by unknown authority"
        if re.fullmatch(r"[\d.]+", name):
            why = "because it doesn't contain any IP SANs"
            return f"{prefix}cannot validate certificate for {name} {why}"
        return f"{prefix}certificate is not valid for {name}"
    if isinstance(error, httpx2.ConnectError):
        return f"dial tcp {urlsplit(url).netloc}: connect: connection refused"
    return "EOF"
