"""The deployments of deploy/examples give their workers options that go together."""

import pathlib
import types

import pytest
import yaml

from dynamo.engine.adapters.vllm import connectors

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))


def read_words(path):
    """Yield the arguments of each service's container."""
    for service in yaml.safe_load(path.read_text())["spec"]["services"].values():
        yield service.get("extraPodSpec", {}).get("mainContainer", {}).get("args", [])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_prefill_worker_has_a_connector_that_passes_on_blocks(path):
    for words in read_words(path):
        if "--is-prefill-worker" not in words or "--connector" not in words:
            continue
        names = words[words.index("--connector") + 1 :]
        fields = {"kv_connector_extra_config": {}} | connectors.transfer_config(names, "engine")

        assert connectors.can_export(types.SimpleNamespace(**fields)), names
