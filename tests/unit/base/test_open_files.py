"""A process asks for as many open files as it needs, and no more than it may have."""

import resource

import pytest

from dynamo.base import open_files

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after", "room"),
    [
        ((1024, 20_000), 1200, 1000),  # as many as are wanted
        ((1024, 1100), 1100, 900),  # as many as may be
        ((1024, INFINITE), 1200, 1000),
        ((5000, 20_000), 5000, 1000),  # there are enough
        ((INFINITE, INFINITE), INFINITE, 1000),
        ((64, 64), 64, 1),
    ],
)
def test_the_limit_is_raised_as_far_as_needed_and_allowed(monkeypatch, before, after, room):
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))

    assert open_files.make_room(1000) == room
    assert limits[-1] == (after, before[1])
