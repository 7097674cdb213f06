"""How often Python looks for cycles of objects that nobody uses any more.

By default it looks after every 700 new objects. With 64 requests in flight, each some dozens of living objects, that
finds nothing and took a sixth of a frontend's time. What a request leaves behind is freed by counting references; only
a few small cycles remain, which may wait for ten thousand.
"""

import gc

_YOUNG_OBJECTS = 10_000  # some MB, until they are looked through
_OLDER_EVERY = 20
_OLDEST_EVERY = 50


def collect_rarely() -> None:
    """For a process with many requests in flight; call it when its modules are loaded: they are not looked at again."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_EVERY, _OLDEST_EVERY)


def collect_all() -> None:
    """Before a process ends whose modules want to be taken apart in order: those, too, are looked at again."""
    gc.unfreeze()
