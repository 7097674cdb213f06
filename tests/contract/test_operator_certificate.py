"""The certificate of the operator's webhooks on the API server emulator: shared, renewed, trusted before it is used."""

import asyncio
import base64
import contextlib
import importlib.resources
import json
import re
import ssl

import httpx2
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks, tls
from dynamo.observability import metrics
from dynamo.operator import webhooks
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime.backends.kubernetes import connection
from dynamo.testing.kube import cluster as clusters
from waiting import until

SETTINGS = OperatorConfig(webhook_bind_address="127.0.0.1:0")
CRD = ("apiextensions.k8s.io/v1", "CustomResourceDefinition", "dynamographdeployments.nvidia.com")
DAY_S = 86_400.0


class ShiftedClock(clocks.SystemClock):
    """A clock whose calendar can be moved on, and whose long sleeps end at a word."""

    def __init__(self):
        super().__init__()
        self.days = 0
        self.is_time = asyncio.Event()

    def wall(self):
        return super().wall() + self.days * DAY_S

    async def sleep(self, seconds):
        if seconds < 100:
            await super().sleep(seconds / 100)
        else:
            await self.is_time.wait()
            self.is_time.clear()


@contextlib.asynccontextmanager
async def connecting(folder):
    """Run a cluster with our definitions; yield a connection to it."""
    definitions = importlib.resources.files("dynamo.operator").joinpath("definitions.json")
    custom_resources = json.loads(definitions.read_text())
    async with clusters.run_cluster(custom_resources=custom_resources) as running:
        running.write_kubeconfig(folder / "kubeconfig").close()
        environ = {"KUBECONFIG": str(folder / "kubeconfig")}
        async with connection.KubernetesConnection.open(environ) as cluster:
            yield cluster


@contextlib.asynccontextmanager
async def running_webhooks(cluster, clock, registry=None):
    service = webhooks.WebhookService(cluster, SETTINGS, clock, registry)
    await service.start()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(service.keep_registered()),
            tasks.create_task(service.keep_certificate()),
        ]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
    await service.close(is_stopped=True)


async def test_reviews_and_refusals_are_counted(tmp_path):
    registry = metrics.Registry("dynamo_operator")
    multinode = {
        "componentType": "worker",
        "multinode": {"nodeCount": 2},
        "extraPodSpec": {
            "mainContainer": {"image": "i", "command": ["python3", "-m", "dynamo.trtllm"]}
        },
    }
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g", "namespace": "default"},
        "spec": {"services": {"Worker": multinode}},
    }
    async with connecting(tmp_path) as cluster, running_webhooks(cluster, ShiftedClock(), registry):

        async def is_registered():
            return (await cluster.get(*CRD))["spec"].get("conversion", {}).get("webhook")

        await until(is_registered)
        with pytest.raises(errors.RequestError, match="multinode"):
            await cluster.create(graph)
        text = registry.render().decode()

    for webhook, refused in (("default", 0), ("validate", 1)):
        assert f'dynamo_operator_webhook_requests_total{{webhook="{webhook}"}} 1.0' in text
        assert f'dynamo_operator_webhook_denials_total{{webhook="{webhook}"}} {refused}.0' in text
    assert 'dynamo_operator_webhook_duration_seconds_count{webhook="validate"} 1.0' in text


async def test_review_that_cannot_be_read_is_refused_in_a_sentence(tmp_path):
    bodies = (b"{", b'{"request": {"uid": "\xff\xfe"}}', b"[" * 100_000, b'{"request": {}}', b"")
    clock = clocks.SystemClock()
    outcomes = []
    async with connecting(tmp_path) as cluster, running_webhooks(cluster, clock):

        async def find_url():
            webhook = (await cluster.get(*CRD))["spec"].get("conversion", {}).get("webhook")
            return webhook and webhook["clientConfig"]["url"].removesuffix("/convert")

        url = await until(find_url)
        async with httpx2.AsyncClient(verify=False) as client:
            for path in ("/convert", "/validate", "/default"):
                for body in bodies:
                    answer = await client.post(f"{url}{path}", content=body)
                    outcomes.append((answer.status_code, answer.text))

    assert {status for status, _ in outcomes} == {400}
    for _, text in outcomes:
        assert re.match("the body is no (Conversion|Admission)Review: .", text)


async def test_certificate_is_renewed_while_conversions_go_on(tmp_path):
    clock = ShiftedClock()

    async def read_config():
        """Return where and by which certificates the API server calls the webhook, once it does."""
        spec = (await cluster.get(*CRD))["spec"]
        webhook = spec.get("conversion", {}).get("webhook")
        return webhook and webhook["clientConfig"]

    async def presented(config):
        host, port = config["url"].removeprefix("https://").partition("/")[0].split(":")
        return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))

    def graph(name):
        template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
        component = {"name": "Frontend", "type": "frontend", "podTemplate": template}
        return {
            "apiVersion": "nvidia.com/v1beta1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"components": [component]},
        }

    async with connecting(tmp_path) as cluster:
        async with running_webhooks(cluster, clock):
            config = await until(read_config)
            first = await presented(config)
            await cluster.create(graph("before"))
            clock.days = 61
            clock.is_time.set()

            async def renewed():
                return (now := await presented(config)) != first and now

            second = await until(renewed)
            bundle = base64.b64decode((await read_config())["caBundle"]).decode()
            await cluster.create(graph("after"))
            shown = await cluster.get("nvidia.com/v1beta1", "DynamoGraphDeployment", "before")
        async with running_webhooks(cluster, clock):
            third = await presented(await until(read_config))
        served = [v["served"] for v in (await cluster.get(*CRD))["spec"]["versions"]]

    assert (first in bundle, second in bundle) == (True, True)
    assert third == second  # the next operator takes the same
    assert shown["spec"]["components"][0]["name"] == "Frontend"
    assert served == [True, False]


async def test_stopped_operator_leaves_the_definition_to_its_successor(tmp_path):
    clock = clocks.SystemClock()

    async def conversion():
        """Return the URL of the conversion webhook, while v1beta1 is served."""
        spec = (await cluster.get(*CRD))["spec"]
        is_served = all(version["served"] for version in spec["versions"])
        return is_served and spec["conversion"]["webhook"]["clientConfig"]["url"]

    async def lead(service):
        """Start webhooks; let them be registered in a term that ends; return the URL."""
        before = await conversion()
        await service.start()
        async with tasks.Tasks() as term:
            term.start("keep the certificate", service.keep_certificate())
            term.start("register", service.keep_registered())

            async def changed():
                return (await conversion()) not in (before, False)

            await until(changed)
        return await conversion()

    async with connecting(tmp_path) as cluster:
        first, second = (webhooks.WebhookService(cluster, SETTINGS, clock) for _ in range(2))
        urls = [await lead(first), await lead(second)]
        await first.close(is_stopped=True)
        after_first = await conversion()
        await second.close(is_stopped=True)
        after_second = await conversion()

    assert urls[0] != urls[1]
    assert (after_first, after_second) == (urls[1], False)


async def test_folder_in_the_middle_of_a_rotation_is_read_again(tmp_path, caplog):
    first, second = [await tls.make_certificate(["127.0.0.1"]) for _ in range(2)]
    folder = tmp_path / "certificate"
    folder.mkdir()
    (folder / "tls.key").write_bytes(first.key)
    for name in ("tls.crt", "ca.crt"):
        (folder / name).write_bytes(first.certificate)
    settings = OperatorConfig(
        webhook_bind_address="127.0.0.1:0", webhook_certificate_dir=str(folder)
    )

    async def read_config():
        webhook = (await cluster.get(*CRD))["spec"].get("conversion", {}).get("webhook")
        return webhook and webhook["clientConfig"]

    async def presented():
        address = config["url"].removeprefix("https://").partition("/")[0]
        host, port = address.split(":")
        return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))

    async def is_replaced():
        return (await presented()) == second.certificate.decode()

    async with connecting(tmp_path) as cluster, asyncio.TaskGroup() as running:
        service = webhooks.WebhookService(cluster, settings, ShiftedClock())
        await service.start()
        keeping = running.create_task(service.keep_certificate())
        first_term = running.create_task(service.keep_registered())
        config = await until(read_config)
        first_term.cancel()
        for name in ("tls.crt", "ca.crt"):
            (folder / name).write_bytes(second.certificate)
        second_term = running.create_task(service.keep_registered())
        await until(lambda: "the certificate cannot be used" in caplog.text)
        during = await presented()
        (folder / "tls.key").write_bytes(second.key)
        await until(is_replaced)
        bundle = base64.b64decode((await read_config())["caBundle"])
        for task in (keeping, second_term):
            task.cancel()
        await service.close(is_stopped=False)

    assert (during, bundle) == (first.certificate.decode(), second.certificate)
