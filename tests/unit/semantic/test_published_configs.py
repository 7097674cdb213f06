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


def test_configuration_in_the_documentation_is_valid_without_notes():
    page = (ROOT / "docs" / "semantic-router.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)

    assert config_file.parse(text.encode(), CATEGORIES).notes == ()
