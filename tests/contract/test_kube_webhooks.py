"""Webhooks of the API server emulator beside those of a real one: exchanges that were recorded are replayed.

A webhook of the test answers as the recorded one did, good and bad. The client's answers are compared, and the reviews
that the API server sent to the webhook.
"""

import base64
import json
import re

import httpx
import pytest

import kube_recordings
import kube_snapshots
from dynamo.base import tls
from dynamo.runtime.http import server
from kube_recordings import RECORDINGS, Replay, any_cluster, normal
from waiting import PATIENT_S

pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recorded exchanges are not here"
)
KNOWN = {  # exchanges whose answers differ, for reasons that have nothing to do with webhooks
    "02-crd-versions": {
        *(
            "crd-second-version",
            "crd-storage-switch",
            "crd-stored",
            "crd-storedVersions",
            "crd-unserve",
        ),
        *("crd-deprecated", "crd-webhook", "crd-webhook-badca", "crd-back", "crd-finalizer-del"),
        *("crd-deleting-0", "crd-recreated-list"),  # finalizers and generations of definitions
        *("none-read", "deprecated-get", "wh-list-alpha"),  # who owned a field before the recording
    },
    "05-webhooks": {
        "wh-bad-cabundle",  # the configuration was changed by one request more here
        "wh-match-invalid",  # the words of the CEL library
        *(
            "vap-create",
            "vapb-create",
            "vap-deny",
            "vap-del",
            "vapb-del",
        ),  # policies are not emulated
    },
}
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/test"
CHANGES = {  # of the validating webhook, before a recorded exchange; they were not recorded themselves
    "wh-timeout": {"timeoutSeconds": 1},
    "wh-timeout-ignore": {"timeoutSeconds": 1, "failurePolicy": "Ignore"},
    "wh-deny-ignore": {"failurePolicy": "Ignore"},
    "wh-refused": {"clientConfig": {"url": "https://127.0.0.1:18999/none"}},
    "wh-404": {"clientConfig": {"url": "https://127.0.0.1:18444/nothing"}},
    "wh-no-cabundle": {"clientConfig": {"url": "https://127.0.0.1:18444/validate", "caBundle": None}},
    "wh-cn-only": {"clientConfig": {"url": "https://127.0.0.1:18445/validate", "caBundle": "<other>"}},
    "wh-localhost": {"clientConfig": {"url": "https://localhost:18444/validate"}},
    "wh-service-absent": {
        "clientConfig": {"url": None, "service": {"namespace": "t5b", "name": "nosvc", "path": "/v"}}
    },
    "wh-match-no": {"matchConditions": [{"name": "m", "expression": "object.spec.replicas > 5"}]},
    "wh-match-yes": {"matchConditions": [{"name": "m", "expression": "object.spec.replicas > 5"}]},
    "wh-objectsel-no": {"objectSelector": {"matchLabels": {"guard": "yes"}}},
    "wh-objectsel-yes": {"objectSelector": {"matchLabels": {"guard": "yes"}}},
}  # fmt: skip
MUTATION = [
    {"op": "add", "path": "/metadata/labels", "value": {"mutated": "yes"}},
    {"op": "add", "path": "/spec/mode", "value": "webhook"},
]
DENIALS = {
    "deny": {"code": 422, "reason": "Invalid", "message": "services must not be empty"},
    "deny-plain": {},
    "deny-msg": {"message": "no services"},
    "deny-details": {
        "code": 403,
        "reason": "Forbidden",
        "message": "bad",
        "details": {
            "causes": [{"reason": "FieldValueInvalid", "message": "x", "field": "spec.services"}]
        },
    },
}


def encode(operations):
    return base64.b64encode(json.dumps(operations).encode()).decode()


BAD_RESPONSES = {
    "badpatch": {"patch": encode([{"op": "replace", "path": "/spec/nope/x", "value": 1}])},
    "nopatchtype": {"patchType": ""},
    "notb64": {"patch": "%%%"},
    "invalidates": {
        "patch": encode([{"op": "add", "path": "/spec/backendFramework", "value": "zz"}])
    },
    "baduid": {"uid": "x"},
}
BAD_ANSWERS = {
    "noresp": {"response": None},
    "nokind": {"kind": "", "apiVersion": ""},
    "v1beta1": {"apiVersion": "admission.k8s.io/v1beta1"},
}


class RecordedWebhook:
    """The webhooks of the recordings; `behaviour` says how the next call goes wrong."""

    def __init__(self):
        self.behaviour = ""
        self.mutates = True
        self.reviews = []
        self.slow = []

    async def answer(self, exchange):
        path = exchange.request.path
        review = json.loads(exchange.request.body)
        self.reviews.append(review)
        if path not in ("/mutate", "/validate", "/convert"):
            exchange.respond(404, b"")
            return
        is_meant = path == "/convert" or self.behaviour.startswith(path[1:4])
        behaviour = self.behaviour.partition(" ")[2] if is_meant else ""
        if behaviour == "slow":
            self.slow.append(exchange)  # never answered
        elif behaviour == "500":
            exchange.respond(500, b"no")
        elif behaviour == "garbage":
            exchange.respond(200, b'"garbage"')
        else:
            make = self.convert if path == "/convert" else self.admit
            exchange.respond(200, json.dumps(make(review, behaviour, path)).encode())

    def admit(self, review, behaviour, path):
        response = {"uid": review["request"]["uid"], "allowed": True}
        if path == "/mutate" and self.mutates:
            response |= {"patchType": "JSONPatch", "patch": encode(MUTATION)}
            response["warnings"] = ["mutated by the test", "second warning"]
        elif path == "/validate":
            response["warnings"] = ["looked at"]
        if behaviour in DENIALS:
            response = {"uid": response["uid"], "allowed": False, "status": DENIALS[behaviour]}
        response |= BAD_RESPONSES.get(behaviour, {})
        answer = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": response,
        }
        return answer | BAD_ANSWERS.get(behaviour, {})

    def convert(self, review, behaviour, _):
        request = review["request"]
        converted = []
        for item in request["objects"]:
            spec = dict(item["spec"])
            if request["desiredAPIVersion"].endswith("v1beta1"):
                spec["note"] = "from-auto"
            converted.append({**item, "apiVersion": request["desiredAPIVersion"], "spec": spec})
        response = {
            "uid": request["uid"],
            "result": {"status": "Success"},
            "convertedObjects": converted,
        }
        match behaviour:
            case "labels":
                converted[0]["metadata"] = {**converted[0]["metadata"], "labels": {"conv": "yes"}}
            case "rename":
                converted[0]["metadata"] = {**converted[0]["metadata"], "name": "zzz"}
            case "few":
                converted.clear()
            case "fail":
                response["result"] = {"status": "Failed", "message": "cannot convert this"}
            case "uid":
                response["uid"] = "x"
        return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "response": response}  # fmt: skip


class WebhookReplay(Replay):
    """Sends recorded requests that name webhooks, with the webhooks of this test in their place."""

    def __init__(self, http, snapshots, ports, bundles):
        super().__init__(http, snapshots)
        self.ports = ports  # recorded → here
        self.bundles = bundles
        self.base = None

    def localize(self, text, bundle="good"):
        for recorded, here in self.ports.items():
            text = text.replace(f":{recorded}/", f":{here}/")
        text = text.replace("<base64 PEM>", self.bundles[bundle])
        return text.replace("<other>", self.bundles["other"])

    async def send(self, exchange):
        request = exchange["request"]
        bundle = "other" if exchange["name"] == "crd-webhook-badca" else "good"
        body = request.get("body")
        if exchange["name"] == "vwc-create":
            self.base = body["webhooks"][0]
        if body is not None:
            body = json.loads(self.localize(json.dumps(body), bundle))
        if "/customresourcedefinitions/" in request["path"] and request["method"] == "PUT":
            path = request["path"].removesuffix("/status")
            found = await self.http.get(path, headers={"Authorization": "Bearer replay"})
            metadata = found.json()["metadata"]  # recorded later than what stands here
            body["metadata"] |= {name: metadata[name] for name in ("resourceVersion", "uid")}
        return await super().send({**exchange, "request": {**request, "body": body}})

    async def configure(self, changes):
        """Change the validating webhook: its recorded configuration with these fields."""
        changes = dict(changes)
        config = {**self.base["clientConfig"], **changes.pop("clientConfig", {})}
        config = {name: value for name, value in config.items() if value is not None}
        if "service" in config:
            config.pop("url", None)
        body = {"webhooks": [{**self.base, **changes, "clientConfig": config}]}
        answer = await self.http.patch(
            CONFIGURATION,
            content=self.localize(json.dumps(body)),
            headers={"Authorization": "Bearer replay", "Content-Type": "application/merge-patch+json"},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text


def behaviour_of(exchange):
    name, why = exchange["name"], exchange.get("why", "")
    if name in ("wh-timeout", "wh-timeout-ignore"):
        return "val slow"
    if name in ("wh-deny-ignore", "wh-match-no", "wh-match-yes") or name.startswith("wh-objectsel"):
        return "val deny"
    if match := re.fullmatch(
        r"(mut|val)ating webhook answers (\S+)|(validating) webhook answers (\S+)", why
    ):
        return f"{(match[1] or match[3])[:3]} {match[2] or match[4]}"
    if match := re.fullmatch(r"webhook misbehaves: (\S+)", why):
        return f"convert {match[1]}"
    return ""


def without_owners(review):
    """Return a review without what depends on when the server fills in the owners of fields."""
    request = normal(review["request"])
    for name in ("object", "oldObject"):
        for key in ("managedFields", "generation", *kube_recordings._VOLATILE):
            if request.get(name):
                request[name]["metadata"].pop(key, None)
    return request


def distinct(reviews):
    """Return reviews without those that only repeat the one before."""
    shown = [without_owners(review) for review in reviews]
    return [review for n, review in enumerate(shown) if n == 0 or review != shown[n - 1]]


@pytest.fixture
async def webhook(tmp_path):
    """Yield the webhook, its ports, and its certificates in base64."""
    peer = RecordedWebhook()
    good = await tls.make_certificate(["127.0.0.1", "localhost"])
    other = await tls.make_certificate(["elsewhere.example.com"])
    servers, bound = [], []
    for made in (good, other):
        listening = server.HttpServer(
            peer.answer, tls=made.open_context(), error_body=server.plain_error
        )
        bound.append(await listening.start("127.0.0.1", 0))
        servers.append(listening)
    ports = {"18444": bound[0], "18445": bound[1], "18443": bound[0]}
    bundles = {
        name: base64.b64encode(made.certificate).decode()
        for name, made in (("good", good), ("other", other))
    }
    yield peer, ports, bundles
    for listening in servers:
        await listening.close()


def expected_reviews(name):
    """Return the recorded reviews of each exchange."""
    found = {}
    for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines():
        exchange = json.loads(line)
        if "direction" in exchange:
            found.setdefault(exchange["name"].partition("#")[0], []).append(exchange)
    return found


@pytest.mark.parametrize("name", KNOWN)
async def test_webhooks_are_called_as_a_real_server_calls_them(name, webhook, tmp_path):
    peer, ports, bundles = webhook
    text = (RECORDINGS / f"{name}.jsonl").read_text()
    ports = {recorded: here for recorded, here in ports.items() if f":{recorded}/" in text}
    exchanges, reviews = kube_recordings.read(name), expected_reviews(name)
    different = set()
    async with (
        any_cluster(tmp_path) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENT_S) as http,
    ):
        await kube_recordings.define(http, name, exchanges)
        snapshots = kube_snapshots.Snapshots(kube_recordings.read_lines(name))
        replay = WebhookReplay(http, snapshots, ports, bundles)
        for exchange in exchanges:
            title = exchange["name"]
            if replay.base is not None and title in CHANGES:
                await replay.configure(CHANGES[title])
            peer.behaviour, peer.reviews = behaviour_of(exchange), []
            peer.mutates = title not in CHANGES and not peer.behaviour.startswith("val")
            status, body = await replay.send(exchange)
            text = json.dumps(body)
            for known, here in ports.items():
                text = text.replace(f":{here}/", f":{known}/")
            for bundle in bundles.values():
                text = text.replace(bundle, "<base64 PEM>")
            expected = exchange["response"]
            if (status, normal(json.loads(text))) != (expected["status"], normal(expected["body"])):
                different.add(title)
            recorded = [
                hook["request"]["body"] for hook in reviews.get(title, ()) if "request" in hook
            ]
            if recorded and distinct(peer.reviews) != distinct(recorded):
                different.add(f"{title}#hook")

    assert different == KNOWN[name]
