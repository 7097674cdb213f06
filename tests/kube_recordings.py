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
    "continue",
    "selfLink",
)
_CONTROLLERS = (
    "kube-controller-manager"  # writes in its own time, before or after a recorded answer
)
_UNSEEN = "(of this cluster)"


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


def read(name):
    """Return the exchanges of a file that can be replayed: of the administrator, whole, and not streams."""
    exchanges = []
    for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines():
        exchange = json.loads(line)
        request, response = exchange.get("request"), exchange.get("response")
        if "direction" in exchange or not request or not response or not request.get("method"):
            continue
        bodies = (request.get("body"), response.get("body"))
        if any(
            isinstance(body, dict) and body.keys() & {"_truncated_bytes", "_stream", "_base64_head"}
            for body in bodies
        ) or re.search(r"\.\.\.\(\d+ bytes\)$", str(bodies[0])):
            continue
        is_admin = "admin" in (request.get("headers") or {}).get("Authorization", "")
        if is_admin and request["path"].startswith("/") and "watch" not in request["path"]:
            exchanges.append(exchange)
    return exchanges


def normal(value, key=""):
    """Return a body without what differs between two clusters."""
    if isinstance(value, dict):
        kept = {name: normal(child, name) for name, child in value.items()}
        if key == "metadata":
            kept.pop("annotations", None)
            entries = kept.pop("managedFields", None) or ()
            others = [entry for entry in entries if entry.get("manager") != _CONTROLLERS]
            kept["managedFields"] = sorted(  # stored in the order of their times
                others, key=lambda entry: json.dumps(entry, sort_keys=True)
            )
        if value.get("kind") == "Deployment":
            kept.pop("status", None)
        return {
            name: _UNSEEN if name in _VOLATILE and child else child for name, child in kept.items()
        }
    if isinstance(value, list):
        return [normal(child) for child in value]
    if isinstance(value, str):
        if value.startswith("apiVersion: "):  # the same YAML may be written in many ways
            return normal(yaml.safe_load(value))
        value = re.sub(r"^\d+[smhd](\d+[smh])?$", "(age)", value)
        value = re.sub(r"\b(gen-|g{58})[a-z0-9]{5}\b", r"\1xxxxx", value)
        value = re.sub(
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", _UNSEEN, value
        )
        return re.sub(r"\b\d{2,}\b", "N", value) if "ersion" in value else value
    return value


class Replay:
    """Sends recorded requests, with the uids and revisions of this cluster in the place of the recorded ones."""

    def __init__(self, http):
        self.http = http
        self.names = {}  # recorded → here, of uids and revisions
        self.namespaces = set()

    async def send(self, exchange):
        request = exchange["request"]
        path, headers, body = request["path"], dict(request["headers"] or {}), request.get("body")
        headers["Authorization"] = "Bearer replay"
        headers.setdefault("User-Agent", "")  # the recorder sent none
        await self.make_namespace(path, exchange)
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

    async def make_namespace(self, path, exchange):
        match = re.search(r"/namespaces/([^/?]+)/", path)
        if match and match[1] not in self.namespaces and exchange["response"]["status"] != 404:
            self.namespaces.add(match[1])
            headers = {"Authorization": "Bearer replay", "User-Agent": ""}
            labels = {"wh": "on"} if match[1] == "t5b" else {}
            metadata = {"name": match[1], "labels": labels}
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
            await self.http.post("/api/v1/namespaces", json=body, headers=headers)
        response = exchange["response"]
        if (
            match
            and exchange["request"]["method"] in ("GET", "DELETE")
            and response["status"] == 200
        ):
            await self.restore(
                path, response["body"], headers={"Authorization": "Bearer replay", "User-Agent": ""}
            )

    async def restore(self, path, body, headers):
        """Create an object that was there before the recording began."""
        for item in (
            body.get("items", ())
            if isinstance(body, dict) and body.get("kind", "").startswith("Dynamo")
            else ()
        ):
            await self.restore(
                path.split("?")[0] + "/x",
                {**item, "kind": body["kind"].removesuffix("List")},
                headers,
            )
        if (
            not isinstance(body, dict)
            or "uid" not in body.get("metadata", {})
            or body["metadata"]["uid"] in self.names
        ):
            return
        kept = {
            name: body["metadata"][name]
            for name in ("name", "labels", "annotations", "finalizers")
            if name in body["metadata"]
        }
        spec = {name: value for name, value in body.items() if name not in ("metadata", "status")}
        await self.http.post(
            path.split("?")[0].rpartition("/")[0], json={**spec, "metadata": kept}, headers=headers
        )

    def learn(self, recorded, here):
        if not isinstance(recorded, dict) or not isinstance(here, dict):
            return
        for name in ("uid", "resourceVersion", "continue"):
            before, after = ((body.get("metadata") or {}).get(name) for body in (recorded, here))
            if before and after:
                self.names.setdefault(before, after)  # a list may have the revision of an object
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
    if name not in ("03-extras", "05-lifecycle", "05-webhooks"):  # recorded when it was not there
        spec["tier"] = {"type": "string", "default": "gold"}
    await http.post(crds, json=body, headers={"Authorization": "Bearer replay"})
