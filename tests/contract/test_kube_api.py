"""The API server emulator beside a real one: recorded exchanges are replayed, and answers compared.

Each file is replayed in order against a fresh cluster. An answer matches if status and body are equal, without what
differs between any two clusters: uids, revisions, times and addresses, and what controllers write in their own time
(the status of Deployments and their entries of managedFields). YAML is compared by its meaning.
`LEAST` is the share that must match in each file.
With KUBEBUILDER_ASSETS set to a folder with kube-apiserver and etcd, the recordings are replayed against those instead.
"""

import asyncio

import httpx
import pytest

from kube_recordings import RECORDINGS, Replay, any_cluster, define, normal, read
from waiting import PATIENT_S

LEAST = {  # of the exchanges that are replayed
    "02-crd": 0.85,
    "03-apply": 0.94,
    "03-concurrency-patch": 0.93,
    "03-extras": 0.86,
    "03-http-errors": 0.96,
    "04-list-watch": 0.98,
    "05-lifecycle": 0.62,
}
PARTS = {  # of files in which other exchanges concern objects whose creation was not recorded
    "05-lifecycle": ("fin-", "lease-", "event"),
}
pytestmark = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recorded exchanges are not here"
)


@pytest.mark.parametrize("name", LEAST)
async def test_recorded_answers_are_given_again(name, tmp_path):
    exchanges = [entry for entry in read(name) if entry["name"].startswith(PARTS.get(name, ("",)))]
    different = []
    async with (
        any_cluster(tmp_path) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENT_S) as http,
    ):
        await define(http, name, exchanges)
        await asyncio.sleep(0.1)
        replay = Replay(http)
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
