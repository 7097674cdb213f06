"""What a host tier is worth, in virtual time."""

import pytest

from dynamo.simulate import __main__ as command
from dynamo.simulate import tiers

SMALL = ("--users", "4", "--rounds", "4", "--cache-tokens", "8000", "--host-tokens", "30000")


def test_host_tier_is_worth_nothing_at_first_and_much_when_the_cache_is_full():
    settings = tiers.TiersConfig(users=8, rounds=4, cache_tokens=20_000, host_tokens=60_000)
    without, with_tier = (tiers.simulate(settings, rate) for rate in (None, 25e9))

    assert with_tier[:2] == pytest.approx(without[:2], rel=0.05)
    assert with_tier[3] < 0.85 * without[3]


def test_slow_host_tier_is_hardly_worse_than_none():
    settings = tiers.TiersConfig(users=4, rounds=4, cache_tokens=8000, host_tokens=30_000)
    without, slow = (tiers.simulate(settings, rate) for rate in (None, 1e8))

    assert sum(slow) <= 1.05 * sum(without)


def test_command_prints_each_round_with_its_change(capsys):
    code = command.main(["tiers", *SMALL, "--host-gb-per-s", "25,5"])
    caption, _, head, *rounds = capsys.readouterr().out.splitlines()

    assert code == 0
    assert caption.startswith("4 users, 4 rounds of 1000 + 100 tokens; 8,000 tokens in the engine")
    assert head.split() == ["round", "without", "25", "GB/s", "5", "GB/s"]
    assert [line.split()[0] for line in rounds] == ["0", "1", "2", "3", "mean"]


def test_command_draws_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert command.main(["tiers", *SMALL, "--host-gb-per-s", "25", "--output", str(tmp_path)]) == 0

    assert (tmp_path / "tiers.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize("bandwidth", ["fast", "0", "nan", "inf", "1,-5"])
def test_bandwidth_that_is_none_is_refused_before_anything_is_simulated(
    bandwidth, capsys, monkeypatch
):
    monkeypatch.delattr(tiers, "simulate")

    assert command.main(["tiers", *SMALL, f"--host-gb-per-s={bandwidth}"]) == 2
    assert "--host-gb-per-s: expected numbers above 0" in capsys.readouterr().err


def test_requests_that_do_not_fit_into_the_engine_are_refused(capsys):
    argv = [
        "tiers",
        "--users",
        "1",
        "--rounds",
        "2",
        "--turn-tokens",
        "100",
        "--answer-tokens",
        "10",
    ]

    assert command.main([*argv, "--cache-tokens", "192"]) == 2
    assert "expected room for the longest request, 220 tokens" in capsys.readouterr().err
