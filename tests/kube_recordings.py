"""Recorded exchanges with a real API server, replayed against the emulator or against real binaries."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess

import httpx
import yaml

import ports
from dynamo.testing.kube import cluster as clusters
from kube_snapshots import Target, collection_path, given_revision, shown_objects, without_admitted
from waiting import PATIENT_S

RECORDINGS = pathlib.Path(__file__).parents[1].parent / "shared" / "data" / "kube"
_VOLATILE = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "time",
    "lastTransitionTime",
    "lastUpdateTime",
    "lastPhaseTransitionTime",
    "continue",
    "selfLink",
    *("clusterIP", "clusterIPs", "nodePort"),
)
_CONTROLLERS = (
    "kube-controller-manager"  # writes in its own time, before or after a recorded answer
)
_UNSEEN = "(of this cluster)"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_ADMINISTRATOR = {"Authorization": "Bearer replay", "User-Agent": ""}
_RESTORED = ("name", "generateName", "namespace", "labels", "annotations", "finalizers")
_OF_DELETION = ("foregroundDeletion", "orphan")  # finalizers that the server itself adds
_UNREPEATABLE = (101, 304)  # streams, and answers by the ETag of a document of that server
_DISCOVERY = r"/(version|api|apis|api/v1|apis/[^/]+|apis/[^/]+/[^/]+|openapi/.*)/?$"
_OF_KUBELET = r"/pods/[^/]+/(log|exec|attach|portforward)\b|/services/[^/]+/proxy"
PROXIED = ("01-kubectl", "01-kubectl-builtin", "07-clients", "08-process-kubelet")


@contextlib.asynccontextmanager
async def real_binaries(folder: pathlib.Path, tmp_path: pathlib.Path):
    """Run etcd and kube-apiserver from a folder; yield the address and the token."""
    client, peer, secure = ports.reserve(), ports.reserve(), ports.reserve()
    key = tmp_path / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (tmp_path / "tokens.csv").write_text("replay,admin,1,system:masters\n")
    urls = [f"http://127.0.0.1:{port}" for port in (client, peer)]
    etcd = await asyncio.create_subprocess_exec(
        folder / "etcd", "--data-dir", tmp_path / "etcd", "--listen-client-urls", urls[0], "--advertise-client-urls",
        urls[0], "--listen-peer-urls", urls[1], stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    server = await asyncio.create_subprocess_exec(
        folder / "kube-apiserver", "--etcd-servers", urls[0], "--secure-port", str(secure), "--cert-dir", tmp_path,
        "--service-account-key-file", key, "--service-account-signing-key-file", key, "--service-account-issuer",
        "https://kubernetes.default.svc", "--token-auth-file", tmp_path / "tokens.csv", "--authorization-mode", "RBAC",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"https://127.0.0.1:{secure}"
    try:
        async with httpx.AsyncClient(verify=False, timeout=PATIENT_S) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{url}/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
        yield url
    finally:
        for process in (server, etcd):
            process.terminate()
            await process.wait()


@contextlib.asynccontextmanager
async def any_cluster(tmp_path):
    """Yield the address of the emulator or, where there are any, of real binaries."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        async with real_binaries(pathlib.Path(assets), tmp_path) as url:
            yield url
    else:
        async with clusters.run_cluster(token="replay") as running:
            yield running.url


def read_lines(name):
    return (RECORDINGS / f"{name}.jsonl").read_text().splitlines()


def read(name):
    """Return the exchanges of a file that can be replayed: of the administrator, whole, and not streams."""
    exchanges = []
    for n, line in enumerate(read_lines(name)):
        exchange = {**json.loads(line), "line": n}
        request, response = exchange.get("request"), exchange.get("response")
        if "direction" in exchange or not request or not response or not request.get("method"):
            continue
        bodies = (request.get("body"), response.get("body"))
        if any(
            isinstance(body, dict) and body.keys() & {"_truncated_bytes", "_stream", "_base64_head"}
            for body in bodies
        ) or re.search(r"\.\.\.\(\d+ bytes\)$", str(bodies[0])):
            continue
        if response["status"] in _UNREPEATABLE or re.search(_OF_KUBELET, request["path"]):
            continue
        if re.match(_DISCOVERY, request["path"].split("?")[0]) and name != "02-crd-versions":
            continue
        is_admin = (
            name in PROXIED  # which takes the header away
            or "admin" in (request.get("headers") or {}).get("Authorization", "")
        )
        if is_admin and request["path"].startswith("/") and "watch" not in request["path"]:
            exchanges.append(exchange)
    return exchanges


def _is_token_volume(item):
    """Return whether a volume or its mount is the token of a service account, of which a process needs none."""
    return isinstance(item, dict) and item.get("name", "").startswith("kube-api-access-")


def normal(value, key=""):
    """Return a body without what differs between two clusters."""
    if isinstance(value, dict):
        value = {
            name: [item for item in child if not _is_token_volume(item)]
            if name in ("volumes", "volumeMounts") and isinstance(child, list)
            else child
            for name, child in value.items()
        }
        kept = {
            _UUID.sub(_UNSEEN, name): normal(child, name)
            for name, child in value.items()
            if name
            != 'k:{"type":"PodScheduled"}'  # owned where a patch has another time than the binding
            if child or name not in ("volumes", "volumeMounts")
        }
        if key == "metadata":
            kept.pop("annotations", None)
            entries = kept.pop("managedFields", None) or ()
            others = [entry for entry in entries if entry.get("manager") != _CONTROLLERS]
            kept["managedFields"] = sorted(  # stored in the order of their times
                others, key=lambda entry: json.dumps(entry, sort_keys=True)
            )
        for column in kept.get("columnDefinitions") or ():
            column.pop("description", None)  # of the documentation
        if value.get("kind") == "Deployment":
            kept.pop("status", None)
        return {
            name: _UNSEEN
            if name in _VOLATILE and child not in (None, "", "None", ["None"])
            else child
            for name, child in kept.items()
        }
    if isinstance(value, list):
        return [normal(child) for child in value]
    if isinstance(value, str):
        if value.startswith("apiVersion: "):  # the same YAML may be written in many ways
            return normal(yaml.safe_load(value))
        value = re.sub(r"^\d+[smhd](\d+[smh])?$", "(age)", value)
        value = re.sub(r"\b(gen-|g{58})[a-z0-9]{5}\b", r"\1xxxxx", value)
        value = _UUID.sub(_UNSEEN, value)
        return re.sub(r"\b\d{2,}\b", "N", value) if "ersion" in value else value
    return value


class Replay:
    """Sends recorded requests, with the uids and revisions of this cluster in the place of the recorded ones."""

    def __init__(self, http, snapshots):
        self.http = http
        self.snapshots = snapshots  # of objects that were there before the recording began
        self.names = {}  # recorded → here, of uids and revisions
        self.namespaces = set()

    async def send(self, exchange):
        request = exchange["request"]
        path, headers, body = request["path"], dict(request["headers"] or {}), request.get("body")
        headers["Authorization"] = "Bearer replay"
        headers.setdefault("User-Agent", "")  # the recorder sent none
        await self.prepare(exchange)
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        path = re.sub(
            r"(resourceVersion|continue)=([^&]+)",
            lambda match: f"{match[1]}={self.names.get(match[2], match[2])}",
            path,
        )
        if text:
            text = re.sub(
                r'"([-0-9a-f]{36}|\d+)"',
                lambda match: f'"{self.names.get(match[1], match[1])}"',
                text,
            )
        answer = await self.http.request(request["method"], path, content=text, headers=headers)
        try:
            content = answer.json()
        except ValueError:
            content = answer.text or None
        self.learn(exchange["response"].get("body"), content)
        return answer.status_code, content

    async def prepare(self, exchange):
        """Create what was there before a recorded request: its namespace, its object, and what the object owns."""
        request, response = exchange["request"], exchange["response"]
        target = Target.parse(request["path"])
        if target is None or response["status"] == 404:
            return
        namespace = target.name if target.plural == "namespaces" else target.namespace
        if namespace and namespace not in self.namespaces:
            self.namespaces.add(namespace)
            labels = {"wh": "on"} if namespace == "t5b" else {}
            metadata = {"name": namespace, "labels": labels}
            await self.create(
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
            )
        for snapshot in self.needed(target, exchange):
            await self.restore(snapshot)
            if request["method"] == "DELETE":
                for dependent in self.snapshots.owned_by(snapshot["metadata"].get("uid")):
                    await self.restore(dependent)
        revision = (
            given_revision(request["body"]) if request["method"] in ("PATCH", "PUT") else None
        )
        if revision not in (None, *self.names) and response["status"] == 200:  # no answer shows it
            found = await self.http.get(request["path"].split("?")[0], headers=_ADMINISTRATOR)
            if found.is_success:
                self.names[revision] = found.json()["metadata"]["resourceVersion"]

    def needed(self, target, exchange):
        """Return what must be there for the recorded answer."""
        request, response = exchange["request"], exchange["response"]
        if target.plural == "namespaces":
            is_deletion = request["method"] == "DELETE"
            return self.snapshots.of_namespace(target.name, exchange["line"]) if is_deletion else ()
        if not target.name and request["method"] == "GET":
            return (
                self.snapshots.of_collection(target)
                if "limit=" in request["path"]
                else shown_objects(response["body"])
            )
        if not target.name and request["method"] == "DELETE":
            return shown_objects(response["body"])
        if not target.name or (response["status"] == 201 and not target.subresource):
            return ()
        snapshot = self.snapshots.find(target, exchange["line"], request)
        if snapshot is not None and target.subresource == "binding":
            spec = {name: value for name, value in snapshot["spec"].items() if name != "nodeName"}
            snapshot = {**snapshot, "spec": spec, "status": None}
        return () if snapshot is None else (snapshot,)

    async def restore(self, snapshot):
        """Create an object as a recorded answer shows it, unless there is one of this name."""
        meta = snapshot["metadata"]
        uid = meta.get("uid")
        home = collection_path(snapshot)
        if (uid and uid in self.names) or snapshot["kind"] == "Namespace":
            return
        found = await self.http.get(f"{home}/{meta['name']}", headers=_ADMINISTRATOR)
        if found.status_code != 404:  # one more attempt to create it would reach webhooks
            return
        kept = {name: meta[name] for name in _RESTORED if name in meta}
        kept["finalizers"] = [
            name for name in kept.get("finalizers", ()) if name not in _OF_DELETION
        ]
        for owner in meta.get("ownerReferences", ()):
            await self.restore_owner(owner, meta)
        kept["ownerReferences"] = [
            {**owner, "uid": self.names.get(owner["uid"], owner["uid"])}
            for owner in meta.get("ownerReferences", ())
        ]
        managers = {
            entry.get("subresource", ""): entry["manager"]
            for entry in meta.get("managedFields", ())
        }
        content = {
            name: value for name, value in snapshot.items() if name not in ("metadata", "status")
        }
        node = None
        if snapshot["kind"] == "Pod" and managers:
            content["spec"], node = without_admitted(snapshot)
        answer = await self.create(
            f"{home}?fieldManager={managers.get('', '')}", {**content, "metadata": kept}
        )
        if node:
            binding = {
                "kind": "Binding",
                "metadata": {"name": meta["name"]},
                "target": {"kind": "Node", "name": node},
            }
            await self.create(f"{home}/{meta['name']}/binding", {"apiVersion": "v1", **binding})
        if answer.status_code == 201 and "status" in managers and snapshot.get("status"):
            body = {**answer.json(), "status": snapshot["status"]}
            path = f"{home}/{meta['name']}/status?fieldManager={managers.get('status', '')}"
            answer = await self.http.put(path, json=body, headers=_ADMINISTRATOR)
        if answer.is_success:
            self.learn(snapshot, answer.json())

    async def restore_owner(self, owner, dependent):
        """Create an owner that no answer shows; a dependent without one would be deleted."""
        if owner["uid"] in self.names:
            return
        meta = {"name": owner["name"], "namespace": dependent.get("namespace"), "uid": owner["uid"]}
        snapshot = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "metadata": meta}
        if owner["kind"] == "Namespace":
            found = await self.http.get(
                f"/api/v1/namespaces/{owner['name']}", headers=_ADMINISTRATOR
            )
            self.learn(snapshot, found.json())
            return
        if owner["kind"] not in ("ReplicaSet", "Job"):
            await self.restore({**snapshot, "spec": {}})
            return
        labels = {"of": owner["name"], **dependent["labels"]}
        template = {
            "metadata": {"labels": labels},
            "spec": {
                "containers": [{"name": "a", "image": "x"}],
                "restartPolicy": "Never" if owner["kind"] == "Job" else "Always",
            },
        }
        spec = {"selector": {"matchLabels": labels}, "template": template}
        spec |= (
            {"replicas": 0}
            if owner["kind"] == "ReplicaSet"
            else {"suspend": True, "manualSelector": True}
        )
        meta["finalizers"] = ["example.com/held"]
        await self.restore({**snapshot, "spec": spec})
        path = f"{collection_path(snapshot)}/{owner['name']}"  # whose controller leaves the pods alone then
        await self.http.delete(f"{path}?propagationPolicy=Background", headers=_ADMINISTRATOR)

    async def create(self, path, body):
        return await self.http.post(path, json=body, headers=_ADMINISTRATOR)

    def learn(self, recorded, here):
        if not isinstance(recorded, dict) or not isinstance(here, dict):
            return
        for name in ("uid", "resourceVersion", "continue"):
            for part in ("metadata", "details"):
                before, after = ((body.get(part) or {}).get(name) for body in (recorded, here))
                if before and after:
                    self.names.setdefault(before, after)  # a list may have an object's revision
        for before, after in zip(
            recorded.get("items") or (), here.get("items") or (), strict=False
        ):
            self.learn(before, after)


async def define(http, name, exchanges):
    """Create the recordings' custom resource, unless they do it themselves."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    if exchanges[1]["name"] == "crd-create":
        return
    body = next(e["request"]["body"] for e in read("02-crd") if e["name"] == "crd-create")
    spec = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]
    if any('"gold"' in line for line in read_lines(name)):  # others were recorded without it
        spec["tier"] = {"type": "string", "default": "gold"}
    await http.post(crds, json=body, headers=_ADMINISTRATOR)
