"""The servers that the clients ask."""

import client_rig
import pytest


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The built-in model: it knows a few questions, calls tools and thinks."""
    with client_rig.serve(tmp_path_factory.mktemp("serve"), "storyteller") as server:
        yield server


@pytest.fixture(scope="session")
def reasoner(tmp_path_factory):
    """The same under a name that clients take for models that think."""
    folder = tmp_path_factory.mktemp("serve")
    with client_rig.serve(folder, "claude-4-o3-storyteller") as server:
        yield server


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """The simulated engine with the context of a large model, for clients whose prompts are long."""
    flags = ("--engine", "mocker", "--worker-flags", "--speedup-ratio 1000 --max-model-len 40960")
    with client_rig.serve(tmp_path_factory.mktemp("serve"), "simulated", *flags) as server:
        yield server
