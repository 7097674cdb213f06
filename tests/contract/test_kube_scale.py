"""The scale of a workload on the API server of the laptop, as `kubectl scale` and autoscalers change it."""

import httpx
import pytest

from kube_recordings import any_cluster
from waiting import PATIENT_S

ROOT = {"authorization": "Bearer replay"}
JSON_PATCH = {"content-type": "application/json-patch+json"}
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "d"},
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"app": "d"}},
        "template": {
            "metadata": {"labels": {"app": "d"}},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        },
    },
}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/spec/replicas", 200, {"replicas": 0}),
        ("/spec/pods", 422, "the server rejected our request due to an error in our request"),
    ],
)
async def test_json_patch_of_a_scale_is_applied_or_refused(tmp_path, path, status, says):
    deployments = "/apis/apps/v1/namespaces/default/deployments"
    patch = [{"op": "replace", "path": path, "value": 0}]
    async with (
        any_cluster(tmp_path) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENT_S, headers=ROOT) as http,
    ):
        created = await http.post(deployments, json=DEPLOYMENT)
        answer = await http.patch(f"{deployments}/d/scale", json=patch, headers=JSON_PATCH)

    assert created.status_code == 201, created.text
    assert answer.status_code == status
    assert answer.json()["spec" if status == 200 else "message"] == says
