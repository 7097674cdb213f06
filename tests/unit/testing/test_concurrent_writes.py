"""Patches and applies of the API server, also while another client writes the same object."""

import pytest

from dynamo.testing.kube import api, failures, garbage, resources, rights, store

NAMESPACE = "default"


class BusyApi(api.Api):
    """An API server whose object is written by somebody else while a write waits for its webhooks."""

    num_disturbances = 0

    async def _admit(self, resource, old, item, options):
        admitted = await super()._admit(resource, old, item, options)
        if old is not None and self.num_disturbances:
            self.num_disturbances -= 1
            current = self.store.get(resource.key, (NAMESPACE, "c"))
            self.store.put(resource.key, {**current, "data": {**current["data"], "other": "2"}})
        return admitted


@pytest.fixture
async def served():
    objects, registry = store.Store(), resources.ResourceRegistry()
    busy = BusyApi(registry, objects, rights.Authority(objects, "token"))
    namespaces = registry.require("", "namespaces")
    await busy.create(
        namespaces, "", garbage.new_namespace(NAMESPACE), api.WriteOptions(manager="m")
    )
    return busy


def body_of(value, **metadata):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c", **metadata},
        "data": {"own": value},
    }


@pytest.mark.parametrize("media_type", [api.APPLY_PATCH, api.MERGE_PATCH])
async def test_patch_is_made_on_what_another_client_wrote_meanwhile(served, media_type):
    maps = served.registry.require("", "configmaps")
    options = api.WriteOptions(manager="m")
    await served.create(maps, NAMESPACE, body_of("0"), options)
    served.num_disturbances = 2
    change = body_of("1") if media_type == api.APPLY_PATCH else {"data": {"own": "1"}}
    forced = api.WriteOptions(manager="m", is_forced=True)
    patched, _ = await served.patch(maps, NAMESPACE, "c", media_type, change, forced)

    assert patched["data"] == {"own": "1", "other": "2"}


async def test_patch_that_names_an_older_version_is_a_conflict(served):
    maps = served.registry.require("", "configmaps")
    options = api.WriteOptions(manager="m")
    first = await served.create(maps, NAMESPACE, body_of("0"), options)
    await served.patch(maps, NAMESPACE, "c", api.MERGE_PATCH, {"data": {"own": "1"}}, options)
    stale = body_of("2", resourceVersion=first["metadata"]["resourceVersion"])

    with pytest.raises(failures.ApiError, match="the object has been modified"):
        await served.patch(maps, NAMESPACE, "c", api.APPLY_PATCH, stale, options)


def deployment_with(**fields):
    labels = {"app": "x"}
    containers = [{"name": "main", "image": "x:1", **fields}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": spec,
    }


async def test_structure_that_is_applied_no_longer_goes_with_its_defaults(served):
    kind = served.registry.require("apps", "deployments")
    probe = {"httpGet": {"path": "/live", "port": 8000}, "periodSeconds": 5}
    containers = []
    for fields in ({"livenessProbe": probe}, {}):
        applied, _ = await served.patch(
            kind, NAMESPACE, "d", api.APPLY_PATCH, deployment_with(**fields), api.WriteOptions()
        )
        containers.append(applied["spec"]["template"]["spec"]["containers"][0])

    assert containers[0]["livenessProbe"]["httpGet"]["scheme"] == "HTTP"
    assert "livenessProbe" not in containers[1]
