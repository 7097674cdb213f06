"""Another user of the host, without any setting of ours, cannot use a cluster whose addresses it knows."""

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest
from deployment import MODEL

from dynamo.protocols import instances, kv_transfer, model_card
from dynamo.runtime import component
from waiting import PATIENT_S, eventually

ATTACKS = pathlib.Path(__file__).with_name("other_user.py")
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


async def addresses(directory):
    """All that discovery knows, as root would find it; without metadata as long as the prefill worker is not there."""
    settings = component.RuntimeConfig(file_kv=directory)
    async with await component.DistributedRuntime.open(settings) as runtime:
        records = await runtime.discovery.get_prefix("v1/")
    endpoints, channels, metadata, num_cards = {}, {}, None, 0
    for key, value in records.items():
        if key.startswith(instances.INSTANCES):
            record = msgspec.json.decode(value, type=instances.Instance)
            endpoints[record.name.path] = record.transport["tcp"]
        elif key.startswith(instances.EVENT_CHANNELS):
            channel = msgspec.json.decode(value, type=instances.EventChannel)
            channels[channel.topic] = (channel.transport["zmq"], channel.instance_id)
        elif key.startswith(instances.CARDS):
            num_cards += 1
            card = msgspec.json.decode(value, type=model_card.CardRecord).card_json
            data = card.runtime_config.runtime_data
            metadata = data.get(kv_transfer.METADATA_KEY, metadata)
    return {
        "instances": endpoints,
        "channels": channels,
        "metadata": metadata,
        "num_cards": num_cards,
        "directory": directory,
    }


def attack(target, wait_s):
    """What came of each attempt, which gives up after `wait_s` without an answer."""
    done = subprocess.run(
        [sys.executable, str(ATTACKS), json.dumps(target | {"wait_s": wait_s})],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fetch(url):
    """What another user gets at a URL."""
    modules = "encodings.idna, os, sys, urllib.request"  # another user may not read them later
    script = (
        f"import {modules}; os.setuid(65534); print(urllib.request.urlopen(sys.argv[1]).read())"
    )
    argv = [sys.executable, "-c", script, url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(deployment):
    """A cluster with a prefill and a decode worker: its frontend, and all its addresses."""
    frontend = deployment.frontend("--router-mode", "kv")
    deployment.mocker("--disaggregation-mode", "prefill")
    deployment.mocker("--disaggregation-mode", "decode")
    frontend.await_models([MODEL])  # one of the two is enough for that
    targets = []

    def has_both():
        targets.append(asyncio.run(addresses(deployment.environ["DYN_FILE_KV"])))
        return targets[-1]["metadata"] is not None and targets[-1]["num_cards"] == 2

    eventually(has_both, what="the cards of both workers")
    return frontend, targets[-1]


def test_other_user_cannot_generate_copy_blocks_clear_caches_or_hear_events(deployment):
    frontend, target = start(deployment)
    results = attack(target, wait_s=3)
    honest = frontend.chat("Tell me a story " * 40, max_tokens=5)

    assert set(results.values()) == {"refused"}, results
    assert honest.status_code == 200


def test_other_user_reaches_the_api_on_loopback_and_an_open_system_port(deployment):
    frontend, worker = deployment.frontend(), deployment.mocker()
    frontend.await_models([MODEL])

    assert f'"{MODEL}"' in fetch(f"{frontend.url}/v1/models")
    assert "dynamo_component_" in fetch(f"{worker.url}/metrics")


def test_same_attacks_succeed_on_an_insecure_cluster(deployment):
    deployment.environ["DYN_INSECURE"] = "1"
    _, target = start(deployment)
    results = attack(target, wait_s=PATIENT_S / 4)
    successes = {name for name, result in results.items() if result != "refused"}

    assert {"call dynamo/backend/generate", "copy by tcp"} <= successes, results
    assert any("clear_kv_blocks" in name for name in successes), results
    assert any("hear" in name for name in successes), results
