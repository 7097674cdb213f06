"""The file by which clients find the laptop's cluster."""

import errno
from unittest import mock

import pytest

from dynamo.base import errors
from dynamo.testing.kube import cluster


@pytest.mark.parametrize("name", ["none/kubeconfig", "file/kubeconfig", "folder"])
def test_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    running = cluster.Cluster(None, None, "https://x", b"", "token")

    with pytest.raises(errors.ConfigError, match=f"--kubeconfig {tmp_path / name}: cannot be"):
        running.write_kubeconfig(tmp_path / name)


def test_nothing_is_left_of_a_file_that_a_full_disk_cuts_off(tmp_path, monkeypatch):
    """Else the next cluster would take it for that of another one."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(cluster.json, "dump", full)
    running = cluster.Cluster(None, None, "https://x", b"", "token")

    with pytest.raises(errors.ConfigError, match="kubeconfig: cannot be written: No space left"):
        running.write_kubeconfig(tmp_path / "kubeconfig")
    assert not list(tmp_path.iterdir())


def test_file_of_a_cluster_is_written_again(tmp_path):
    running = cluster.Cluster(None, None, "https://x", b"", "token")
    for _ in range(2):
        running.write_kubeconfig(tmp_path / "kubeconfig").close()

    assert (tmp_path / "kubeconfig").stat().st_mode & 0o777 == 0o600


def test_file_of_a_cluster_that_runs_is_kept(tmp_path):
    running = cluster.Cluster(None, None, "https://first", b"", "token")
    later = cluster.Cluster(None, None, "https://second", b"", "token")
    path = tmp_path / "kubeconfig"
    with (
        running.write_kubeconfig(path),
        pytest.raises(errors.ConfigError, match=f"{path}: is that of a dynamo kube up that runs"),
    ):
        later.write_kubeconfig(path)

    assert "https://first" in path.read_text()
