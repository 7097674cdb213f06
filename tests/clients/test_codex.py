"""Codex CLI over Responses, not interactively.

The simulated engine never ends its turn, so an answer that Codex has read ends where the context is full.
"""

import json

import client_rig

CONFIG = """model = "{model}"
model_provider = "dynamo"
[model_providers.dynamo]
name = "dynamo"
base_url = "{url}"
wire_api = "responses"
"""


def test_codex_reads_an_answer(simulated, tmp_path):
    command = client_rig.find_client("npm/node_modules/.bin/codex")
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=simulated.model, url=simulated.v1))
    said = client_rig.run_client(
        *(command, "exec", "--skip-git-repo-check", "--json", "-C", tmp_path, "Say hello"),
        statuses=(0, 1),
        HOME=str(home),
        CODEX_HOME=str(home),
    )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    errors = [event["message"] for event in events if event["type"] == "error"]

    assert [item for item in items if item["type"] == "agent_message" and item["text"]]
    assert errors == ["Incomplete response returned, reason: max_output_tokens"]
