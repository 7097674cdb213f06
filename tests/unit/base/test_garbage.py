"""The collector is asked rarely, and still finds cycles."""

import gc
import weakref

import pytest

from dynamo.base import garbage


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def settings():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("settings")
def test_cycles_are_found_rarely_but_they_are_found():
    garbage.collect_rarely()
    lost = weakref.ref(Cycle())
    few = [Cycle() for _ in range(1000)]
    is_alive_after_few = lost() is not None
    many = [[] for _ in range(20_000)]

    assert is_alive_after_few
    assert lost() is None
    assert few
    assert many


@pytest.mark.usefixtures("settings")
def test_what_was_there_before_is_not_looked_at_again():
    lasting = Cycle()
    garbage.collect_rarely()

    assert gc.get_freeze_count() > 0
    assert not any(one is lasting for one in gc.get_objects())


@pytest.mark.usefixtures("settings")
def test_what_was_not_looked_at_may_be_looked_at_again():
    garbage.collect_rarely()
    garbage.collect_all()

    assert gc.get_freeze_count() == 0
