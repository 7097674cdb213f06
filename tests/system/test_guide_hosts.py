"""The guide's "Run on several hosts" is executed line by line, each line on its host: a network namespace."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from hosts import Network

from waiting import PATIENT_S

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guide.md"
IN_GUIDE = ("10.0.0.5", "10.0.0.6", "10.0.0.7")


def guide_lines():
    """The lines of the section's blocks, each with the addresses of the hosts that it is for."""
    section = GUIDE.read_text().partition("## Run on several hosts\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```\n(# on .*?)^```$", section, re.M | re.S):
        first, *lines = block.splitlines()
        for line in lines:
            yield re.findall(r"10\.0\.0\.\d", first), line


class Shell:
    """A shell on a host, in the directory of the files that the hosts share."""

    def __init__(self, host, directory, environ):
        self._log = (directory / f"{host.name}.log").open("ab")
        self.popen = subprocess.Popen(
            [*host.argv, "bash"],
            cwd=directory,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def run(self, line):
        """Return the output of a line; it must succeed. `timeout` of the test bounds it."""
        self.popen.stdin.write(f'{line}\necho "<end $?>"\n')
        rows = []
        for row in self.popen.stdout:
            if ended := re.search(r"<end (\d+)>$", row.strip()):
                rows.append(row.strip().removesuffix(ended.group(0)))
                assert ended.group(1) == "0", (line, rows)
                return "\n".join(rows)
            rows.append(row.strip())
        raise AssertionError(f"the shell ended: {line} {rows}")

    def end(self):
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.popen.stdin.close()
        self.popen.stdout.close()
        self._log.close()


@pytest.fixture
def shells(tmp_path):
    for tool in ("etcd", "etcdctl", "nats-server", "openssl", "curl", "nft"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: as root on Debian, tests/install_services.sh")
    environ = dict(os.environ) | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ETCDCTL_COMMAND_TIMEOUT": f"{PATIENT_S:g}s",
    }
    with Network().open() as network:
        hosts = {address: network.add() for address in IN_GUIDE}
        made = {address: Shell(host, tmp_path, environ) for address, host in hosts.items()}
        yield made, {address: host.address for address, host in hosts.items()}
        for shell in made.values():
            shell.end()


@pytest.mark.timeout(PATIENT_S * 4)
def test_guide_for_several_hosts_is_executed_line_by_line(shells):
    by_address, real = shells
    outputs = []
    for addresses, line in guide_lines():
        for guide_address, address in real.items():
            line = line.replace(guide_address, address)
        outputs += [by_address[address].run(line) for address in addresses]
    answers = [output for output in outputs if '"text"' in output]
    worker = real["10.0.0.7"]
    for port in (7000, 7100):  # requests and events, which the firewall keeps from other hosts
        probe = f"timeout {{}} bash -c 'true > /dev/tcp/{worker}/{port}'"
        by_address["10.0.0.6"].run(probe.format(PATIENT_S))
        by_address["10.0.0.5"].run(f"! {probe.format(1)}")

    assert len(answers) == 2
    assert '"model":"small"' in answers[0].replace(" ", "")
    assert '"model":"over-nats"' in answers[1].replace(" ", "")
