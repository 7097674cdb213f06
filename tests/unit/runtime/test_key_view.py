import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.runtime import discovery
from dynamo.runtime.discovery import Delete, Put

KEYS = st.sampled_from(["a/1", "a/2", "b/1"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.sampled_from([b"x", b"y"])),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("replace"), st.dictionaries(KEYS, st.just(b"z"))),
        st.tuples(st.just("listen")),
    )
)


class Listener:
    """Follows a watch as a client would: a dictionary that each change is applied to."""

    def __init__(self, watch):
        self.known = {}
        self._watch = watch
        self._next = None

    async def listen(self):
        """Take what waits, at most one change."""
        self._next = self._next or asyncio.ensure_future(anext(self._watch))
        for _ in range(3):
            await asyncio.sleep(0)
        if not self._next.done():
            return False
        change, self._next = self._next.result(), None
        if isinstance(change, Put):
            self.known[change.key] = change.value
        else:
            del self.known[change.key]  # a KeyError if it never heard of the key
        return True

    async def stop(self):
        self._next.cancel()
        await asyncio.wait((self._next,))


async def follow(steps):
    seen, truth = discovery.KeyView(), {}
    listener = Listener(seen.watch("a/"))
    for kind, *what in steps:
        if kind == "put":
            seen.put(*what)
            truth[what[0]] = what[1]
        elif kind == "remove":
            seen.remove(*what)
            truth.pop(what[0], None)
        elif kind == "replace":
            seen.replace(*what)
            truth = dict(*what)
        else:
            await listener.listen()
    while await listener.listen():
        pass
    await listener.stop()
    return listener.known, truth, seen.get_prefix("")


@settings(max_examples=50)
@given(STEPS)
def test_slow_watcher_ends_with_the_current_keys(steps):
    known, truth, shown = asyncio.run(follow(steps))

    assert shown == truth
    assert known == {key: value for key, value in truth.items() if key.startswith("a/")}


async def test_key_removed_before_it_was_read_is_not_reported():
    seen = discovery.KeyView()
    watch = seen.watch("")
    seen.put("first", b"")
    first = await anext(watch)
    seen.put("brief", b"")
    seen.remove("brief")
    seen.remove("first")

    assert first == Put(key="first", value=b"")
    assert await anext(watch) == Delete(key="first")
