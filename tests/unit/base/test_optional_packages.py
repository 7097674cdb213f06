"""Modules that every process loads need nothing that only an extra installs."""

import subprocess
import sys

import pytest

OPTIONAL = ("obstore", "matplotlib", "nats", "grpc", "lightkube", "torch", "xllamacpp")


@pytest.mark.parametrize(
    "module",
    [
        "dynamo.cli.main",
        "dynamo.frontend.service",
        "dynamo.kvbm.tier_setup",
        "dynamo.planner.profiling",
        "dynamo.planner.service",
        "dynamo.simulate.plan",
        "dynamo.worker.main",
    ],
)
def test_module_loads_without_optional_packages(module):
    absent = dict.fromkeys(OPTIONAL)
    program = f"import sys; sys.modules.update({absent}); import {module}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
