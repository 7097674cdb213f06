"""The deployments of deploy/examples give their workers options that go together."""

import pathlib
import re
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


def test_each_image_of_ours_is_built_by_a_line_of_the_page():
    named = {
        name
        for path in (ROOT / "deploy").rglob("*.yaml")
        for name in re.findall(r"image: ([\w./-]*(?:dynamo|pydynamo)[\w./:-]*)", path.read_text())
    }
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    built = set(re.findall(r"build\.sh --framework \w+ --tag (\S+)", page))

    assert len(named) > 2
    assert named <= built
