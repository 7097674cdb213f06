"""Downloads of large files: they go on where they were cut off, and are what the hub has."""

import fcntl
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.worker import hub_models
from waiting import PATIENT_S, eventually

LARGE = "large.txt"


class Puller:
    """`dynamo pull org/slow` into one cache, as often as asked."""

    def __init__(self, hub, home):
        self.hub = hub
        self.home = home
        tag = hashlib.sha256(hub.contents[LARGE]).hexdigest()
        self.blob = home / "hub" / "models--org--slow" / "blobs" / tag
        self.part = self.blob.with_name(f"{tag}{hub_models.PART}")

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


def test_whole_files_of_a_download_that_was_cut_off_are_removed(tmp_path, monkeypatch):
    """The hub's own tools do not list a model without a snapshot."""
    monkeypatch.setattr(hub_models.constants, "HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--org--cut" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(bytes(1000))
    (blobs / f"partial{hub_models.PART}").write_bytes(bytes(10))

    assert hub_models.remove_cached("org/cut") == 1010
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.ConfigError, match="'org/cut' is not in the local cache"):
        hub_models.remove_cached("org/cut")


CONFIGURATION = ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model-1.safetensors", "original/model.safetensors"], ["model-1.safetensors"]),
        (["model-1.safetensors", "consolidated.safetensors"], ["model-1.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["model.safetensors", "2_Dense/model.safetensors"],) * 2,
    ],
)
def test_weights_are_fetched_once(tmp_path, monkeypatch, weights, fetched):
    siblings = [SimpleNamespace(rfilename=path, size=1) for path in CONFIGURATION + weights]
    model = SimpleNamespace(sha="1", siblings=siblings)
    hub = SimpleNamespace(model_info=lambda name, **_: model)
    large, ignored = [], []

    def snapshot_download(name, *, local_files_only, ignore_patterns, **_):
        ignored[:] = ignore_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub_models.huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(hub_models.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub_models.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        hub_models, "fetch_large_files", lambda name, _, paths, __: large.extend(paths)
    )
    hub_models.find("org/model", ("*.json", "*.safetensors"), is_whole=lambda _: False)

    assert large == CONFIGURATION + fetched
    assert ignored == [path for path in weights if path not in fetched]


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Fetch a file of ten bytes into `tmp_path`; return where the hub was asked to begin."""
    content = b"0123456789"
    etag = hashlib.sha256(content).hexdigest()
    starts = []

    def send(url, file, *, resume_size, **_):
        starts.append(resume_size)
        file.write(content[resume_size:])

    facts = SimpleNamespace(size=len(content), etag=etag, location="https://hub/large")
    monkeypatch.setattr(hub_models.huggingface_hub, "get_hf_file_metadata", lambda url: facts)
    monkeypatch.setattr(hub_models.file_download, "http_get", send)

    def fetch_file():
        hub_models._fetch("org/model", "main", "large", tmp_path)
        return starts

    fetch_file.part = tmp_path / f"{etag}{hub_models.PART}"
    fetch_file.blob = tmp_path / etag
    fetch_file.content = content
    return fetch_file


def test_part_that_is_longer_than_the_file_is_dropped(fetch):
    fetch.part.write_bytes(bytes(11))

    assert fetch() == [0]
    assert fetch.blob.read_bytes() == fetch.content


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", [True, False], ids=["killed", "damaged"])
def test_process_that_waited_for_another_one_goes_on_where_that_ended(fetch, ends):
    """The other one is killed when it has five bytes, or finds them damaged and removes its part."""
    with fetch.part.open("ab", buffering=0) as other, ThreadPoolExecutor() as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(fetch)
        eventually(
            lambda: f":{os.fstat(other.fileno()).st_ino} " in _waiting_locks(), what="it waits"
        )
        other.write(fetch.content[:5])
        if not ends:
            fetch.part.unlink()
        fcntl.flock(other, fcntl.LOCK_UN)

        assert waiting.result() == [5 if ends else 0]
    assert fetch.blob.read_bytes() == fetch.content


def _waiting_locks():
    lines = pathlib.Path("/proc/locks").read_text().splitlines()
    return "\n".join(line for line in lines if "->" in line)


def test_file_that_fails_leaves_no_thread_for_which_the_end_of_the_process_waits(
    tmp_path, monkeypatch
):
    may_end = threading.Event()

    def fetch(name, commit, path, blobs):
        if path == "damaged":
            raise OSError("fetch it again")
        may_end.wait(PATIENT_S)

    monkeypatch.setattr(hub_models, "_fetch", fetch)
    with pytest.raises(OSError, match="fetch it again"):
        hub_models.fetch_large_files("m", "c", ["slow", "damaged"], tmp_path)
    threads = [each for each in threading.enumerate() if each.name.startswith("download")]
    may_end.set()

    assert threads
    assert all(each.daemon for each in threads)
