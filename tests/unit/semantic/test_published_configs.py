"""The configurations that this repository ships and shows."""

import pathlib
import re

from dynamo.semantic import config_file
from dynamo.semantic.classifiers import profile

ROOT = pathlib.Path(__file__).parents[3]
CATEGORIES = profile.load_profile().categories


def test_shipped_configuration_is_valid_without_notes():
    loaded = config_file.load(ROOT / "deploy" / "semantic-router" / "config.yaml", CATEGORIES)

    assert len(loaded.settings.decisions) == 15
    assert loaded.notes == ()


def test_configurations_in_the_documentation_are_valid():
    page = (ROOT / "docs" / "semantic-router.md").read_text()
    whole, *parts = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)

    assert config_file.parse(whole.encode(), CATEGORIES).notes == ()
    for part in parts:  # their models are nowhere
        notes = config_file.parse(part.encode(), CATEGORIES).notes
        assert all("no directory models/" in note for note in notes)


def test_start_of_the_page_names_models_and_port_of_the_shipped_files():
    start = (ROOT / "docs" / "semantic-router.md").read_text().split("\n## ")[1]
    folder = ROOT / "deploy" / "semantic-router"
    named = config_file.load(folder / "config.yaml", CATEGORIES).settings.default_model
    on_cluster = re.findall(
        r"--model, ([\w./-]+)", (ROOT / "deploy" / "examples" / "agg.yaml").read_text()
    )
    port = re.findall(r"listen on port (\d+)", start)

    assert re.findall(r"--model-name (\S+)", start) == [named]
    assert re.findall(r"sed -i s,([^,]+),([^,]+),", start) == [(named, on_cluster[0])]
    assert f"port_value: {port[0]}" in (folder / "envoy.yaml").read_text()
