"""The table of published claims: each is measured under its conditions and where it stops being true."""

import json

from dynamo.simulate import __main__ as command


def test_claim_of_disaggregation_holds_where_it_was_published_and_not_with_long_answers(
    tmp_path, capsys
):
    path = tmp_path / "claims.json"
    assert command.main(["claims", "--claim", "disagg", "--report-json", str(path)]) == 0
    rows = {row["conditions"]: row for row in json.loads(path.read_text())["disagg"]}

    assert rows["1 node, 49 tokens/s a user"]["holds"]
    assert not rows["1 node, answers of 1000 tokens, 49 tokens/s"]["holds"]
    assert rows["1 node, at its best"]["holds"] is None
    assert "+30 % tokens per GPU" in capsys.readouterr().out


def test_unknown_claim_is_refused_by_name(capsys):
    assert command.main(["claims", "--claim", "magic"]) == 2
    assert (
        "expected some of tiers, routing, disagg, planner, got 'magic'" in capsys.readouterr().err
    )
