"""Processes know whether they share a host."""

import subprocess
import sys

from dynamo.transfer import host


def test_two_processes_of_one_user_on_one_host_agree():
    other = subprocess.run(
        [sys.executable, "-c", "from dynamo.transfer import host; print(host.identify())"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == host.identify()
