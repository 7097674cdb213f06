"""llm-comply 0.5.0: the schemas of three APIs. Images are refused, for our models read text only."""

import json

import client_rig
import pytest

# What each run must pass. Tests of reasoning run only for some names of models, so the server has such a name.
LEAST = {"openai-chat": 8, "open-responses": 12, "anthropic": 8}


@pytest.mark.parametrize("form", LEAST)
def test_all_but_images_comply(reasoner, form):
    command = client_rig.find_client("bin/llm-comply")
    options = ("--base-url", reasoner.v1, "--api-key", "none", "--model", reasoner.model)
    said = client_rig.run_client(
        command, *options, "--format", form, "--json", "--timeout", "120", statuses=(0, 1)
    )
    results = json.loads(said[said.index("{") :])["results"]
    failed = [row["name"] for row in results if row["status"] == "failed"]

    assert failed == ["Image Input"]
    assert len(results) - len(failed) == LEAST[form]
