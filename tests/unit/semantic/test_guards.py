"""The guards' verdicts."""

import pytest

from dynamo.semantic import config, guards
from dynamo.semantic.classifiers import profile
from semantic_configs import ATTACK, CARD

FAST = profile.load_profile()
GUARD = config.PromptGuard(enabled=True)


class Broken:
    def classify_attack(self, text):
        raise RuntimeError(text)

    def find_pii(self, text):
        raise RuntimeError(text)


def check_attack(plugin, guard=GUARD):
    return guards.check_attack([ATTACK], guard, plugin, FAST)


def test_plugin_of_the_decision_goes_before_the_general_guard():
    assert check_attack(config.JailbreakPlugin(enabled=False)) is None
    assert check_attack(None, config.PromptGuard(enabled=False)) is None
    assert check_attack(None).action == "block"
    assert check_attack(config.JailbreakPlugin(threshold=1.0)).action == "none"
    verdict = check_attack(config.JailbreakPlugin(mode="route", route_to="safe"))
    assert (verdict.action, verdict.route_to) == ("route", "safe")


@pytest.mark.parametrize(
    ("plugin", "action"),
    [
        (config.PiiPlugin(), "block"),
        (config.PiiPlugin(mode="observe"), "observe"),
        (config.PiiPlugin(mode="route", route_to="private"), "route"),
        (config.PiiPlugin(pii_types_allowed=["CREDIT_CARD"]), "none"),
    ],
)
def test_personal_data_gets_the_action_of_the_plugin(plugin, action):
    assert guards.check_pii(["clean", CARD], plugin, 0.7, FAST).action == action


@pytest.mark.parametrize(
    "plugin", [None, config.PiiPlugin(enabled=False), config.PiiPlugin(threshold=0.0)]
)
def test_guard_that_is_off_says_nothing(plugin):
    assert guards.check_pii([CARD], plugin, 0.7, FAST) is None


@pytest.mark.parametrize(("on_error", "action"), [("block", "block"), ("pass", "none")])
def test_failure_follows_the_configuration_and_hides_the_text(on_error, action):
    plugin = config.PiiPlugin(on_error=on_error)

    verdict = guards.check_pii([CARD], plugin, 0.7, Broken())

    assert verdict.action == action
    assert not verdict.is_complete
    assert CARD not in verdict.reason


@pytest.mark.parametrize("mode", ["enforce", "route", "observe"])
def test_failure_of_an_observing_guard_never_blocks(mode):
    plugin = config.PiiPlugin(on_error="block", mode=mode, route_to="private")
    guard = config.PromptGuard(enabled=True, on_error="block", mode=mode, route_to="private")
    verdicts = [
        guards.check_pii([CARD], plugin, 0.7, Broken()),
        guards.check_attack([ATTACK], guard, None, Broken()),
    ]

    assert {verdict.action for verdict in verdicts} == {"none" if mode == "observe" else "block"}


def test_number_of_a_character_without_end_does_not_switch_the_guard_off():
    text = f"&#{'9' * 5000}; {ATTACK} &#{'0' * 5000}"

    assert guards.check_attack([text], GUARD, None, FAST).action == "block"
