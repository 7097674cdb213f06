"""Downloads of large files: they go on where they were cut off, and are what the hub has."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest

from dynamo.worker import hub_download
from waiting import PATIENT_S, eventually

LARGE = "large.txt"


class Puller:
    """`dynamo pull org/slow` into one cache, as often as asked."""

    def __init__(self, hub, home):
        self.hub = hub
        self.home = home
        tag = hashlib.sha256(hub.contents[LARGE]).hexdigest()
        self.blob = home / "hub" / "models--org--slow" / "blobs" / tag
        self.part = self.blob.with_name(f"{tag}{hub_download.PART}")

    def start(self):
        environ = {**os.environ, **self.hub.environ(self.home)}
        del environ["HF_HUB_DISABLE_PROGRESS_BARS"]
        return subprocess.Popen(
            [sys.executable, "-m", "dynamo.cli", "pull", "org/slow"],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self):
        self.hub.gate.set()
        process = self.start()
        _, said = process.communicate(timeout=PATIENT_S)
        return process.returncode, said


@pytest.fixture
def puller(slow_hub, tmp_path):
    return Puller(slow_hub, tmp_path / "home")


def test_download_goes_on_where_it_was_cut_off(puller):
    first = puller.start()
    eventually(
        lambda: puller.part.exists() and puller.part.stat().st_size > 2**20, what="a part of it"
    )
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENT_S)
    exit_code, said = puller.run()

    assert first.returncode == 130
    assert exit_code == 0, said
    assert puller.hub.starts[LARGE][0] == 0 < puller.hub.starts[LARGE][1]
    assert puller.blob.read_bytes() == puller.hub.contents[LARGE]
    assert not puller.part.exists()
    assert "large.txt [00:00:" in said
    assert "/10.00 MiB" in said


def test_damaged_file_is_refused_and_fetched_anew(puller):
    puller.part.parent.mkdir(parents=True)
    puller.part.write_bytes(bytes(2**20))
    exit_code, said = puller.run()

    assert exit_code == 2
    assert "large.txt: expected the SHA-256" in said
    assert not puller.blob.exists()
    assert puller.run()[0] == 0
    assert puller.blob.read_bytes() == puller.hub.contents[LARGE]


def test_part_of_a_model_can_be_removed(puller, monkeypatch, capsys):
    puller.part.parent.mkdir(parents=True)
    puller.part.write_bytes(bytes(2**20))
    removal = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", "rm", "org/slow"],
        env={**os.environ, **puller.hub.environ(puller.home)},
        capture_output=True,
        timeout=PATIENT_S,
    )

    assert removal.returncode == 0, removal.stderr
    assert not puller.part.exists()
