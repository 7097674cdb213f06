"""Every metric family of Dynamo 1.6.1 is exported, or `docs/metrics.md` gives the reason why not."""

import fnmatch
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[3]
FAMILIES = (pathlib.Path(__file__).parent / "dynamo_families.txt").read_text().split()


def test_every_family_is_exported_or_left_out_for_a_reason():
    exported = set(
        re.findall(r"^\| `(dynamo_\w+)`", (ROOT / "docs/reference.md").read_text(), re.M)
    )
    reasons = (ROOT / "docs/metrics.md").read_text().partition("## What is left out")[2]
    rows = [row.split("|")[1] for row in reasons.splitlines() if row.startswith("| `")]
    names = [name.lstrip("…_") for row in rows for name in re.findall(r"`([…\w*]+)`", row)]
    left_out = [name if name.startswith("dynamo_") else f"*_{name}" for name in names]
    unknown = [
        family
        for family in FAMILIES
        if family not in exported and not any(fnmatch.fnmatch(family, name) for name in left_out)
    ]

    assert not unknown
