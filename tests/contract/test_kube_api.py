"""The API server emulator beside a real one: recorded exchanges are replayed, and answers compared.

Each file is replayed in order against a fresh cluster. Objects that were there before the recording began are created
from the answers that show them. An answer matches if status and body are equal, without what differs between any two
clusters: uids, revisions, times and addresses, the volume with a service account's token, the descriptions of columns,
and what controllers write in their own time (the status of Deployments and their entries of managedFields). YAML is
compared by its meaning.
`LEAST` is the share that must match in each file; docs/kubernetes.md says what cannot match, and why.
With KUBEBUILDER_ASSETS set to a folder with kube-apiserver and etcd, the recordings are replayed against those instead.
"""

import asyncio

import httpx
import pytest

import kube_snapshots
from kube_recordings import RECORDINGS, Replay, any_cluster, define, normal, read, read_lines
from waiting import PATIENT_S

LEAST = {  # of the exchanges that are replayed
    "01-kubectl": 0.57,
    "01-kubectl-builtin": 0.26,
    "02-crd": 0.87,
    "03-apply": 0.94,
    "03-concurrency-patch": 0.93,
    "03-extras": 0.89,
    "03-http-errors": 0.96,
    "04-list-watch": 0.98,
    "04-list-watch-2": 0.47,
    "04-list-watch-3": 0.83,
    "05-lifecycle": 0.92,
    "06-controllers": 0.46,
    "07-clients": 0.68,
    "08-process-kubelet": 0.90,
}
pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recorded exchanges are not here"
)


@pytest.mark.parametrize("name", LEAST)
async def test_recorded_answers_are_given_again(name, tmp_path):
    exchanges = read(name)
    different = []
    async with (
        any_cluster(tmp_path) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENT_S) as http,
    ):
        await define(http, name, exchanges)
        await asyncio.sleep(0.1)
        replay = Replay(http, kube_snapshots.Snapshots(read_lines(name)))
        for exchange in exchanges:
            status, body = await replay.send(exchange)
            expected = exchange["response"]
            if (status, normal(body)) != (expected["status"], normal(expected["body"])):
                different.append(
                    (
                        exchange["name"],
                        status,
                        expected["status"],
                        normal(body),
                        normal(expected["body"]),
                    )
                )
    share = 1 - len(different) / len(exchanges)

    assert share >= LEAST[name], [row[:3] for row in different]
