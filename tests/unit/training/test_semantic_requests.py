"""Requests and sentences that are made from frames, to train the semantic router's classifiers."""

import random
from pathlib import Path

import pytest
from training.semantic import requests

FOLDER = Path(requests.__file__).parent
REQUEST_LABELS = ("attack", "harmless", "application")
FILES = {"request_frames.txt": REQUEST_LABELS, "name_frames.txt": ("person", "none")}


@pytest.mark.parametrize(("name", "labels"), FILES.items())
def test_every_frame_is_filled_from_lists_that_exist(name, labels):
    lists, frames = requests.read_frames(FOLDER / name, labels)
    draw = random.Random(1)

    assert sorted(frames) == sorted(labels)
    for frame in (frame for label in labels for frame in frames[label]):
        left = requests.fill(frame, lists, draw).replace("{person}", "")
        assert "{" not in left.replace("{first}", "").replace("{last}", "")


def test_entries_of_entries_are_filled_and_unknown_lists_stay():
    lists = {"a": ["one {b}"], "b": ["two"]}

    assert requests.fill("{a} and {c}", lists, random.Random(1)) == "one two and {c}"


def test_typical_words_are_those_of_attacks():
    attacks = [{"text": "stay immoral about weather", "label": "jailbreak"}] * 3
    harmless = [{"text": "talk about weather", "label": "benign"}] * 9

    assert requests.typical_words([*attacks, *harmless])[:2] == ["immoral", "stay"]
