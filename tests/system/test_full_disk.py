"""Nothing fits on the disk under file discovery any more, and then there is room again."""

import contextlib
import os
import subprocess

import pytest

FAST = ("--speedup-ratio", "1000")


@pytest.fixture
def disk(deployment, tmp_path):
    """A small file system under discovery."""
    path = tmp_path / "disk"
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "discovery", str(path)]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system needs root and the right to mount: {made.stderr.strip()}")
    deployment.environ["DYN_FILE_KV"] = str(path)
    yield path
    deployment.end()
    subprocess.run(["umount", str(path)], check=True)


def fill(disk):
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", 0) as ballast:
        while True:
            ballast.write(bytes(1024))
    assert os.statvfs(disk).f_bavail == 0


def test_full_disk_stops_no_running_process_and_is_named_to_new_ones(deployment, disk):
    dying, _ = deployment.mocker(*FAST), deployment.mocker(*FAST)
    frontend = deployment.frontend()
    frontend.await_workers(2)
    fill(disk)
    served = {frontend.chat(max_tokens=2).status_code for _ in range(4)}
    dying.kill()
    frontend.await_workers(1)  # death is still noticed
    served |= {frontend.chat(max_tokens=2).status_code for _ in range(4)}
    fill(disk)  # the place of the dead one's keys
    refused = deployment.mocker(*FAST)
    code, said = refused.exit_code(), refused.log.read_text()
    (disk / "ballast").unlink()
    deployment.mocker(*FAST)
    frontend.await_workers(2)

    assert served == {200}
    assert code == 2
    assert "No space left on device" in said
    assert "DYN_FILE_KV" in said
    assert "Traceback" not in said + frontend.log.read_text()
    assert frontend.chat(max_tokens=2).status_code == 200
