"""The questions of a tiered cache to an object store that other workers fill."""

import pytest

from dynamo.kvbm import pool as pools
from dynamo.kvbm import preparations, tier_report, tiered_cache, tiers
from dynamo.protocols import kv_events

DEVICE, HOST, _, REMOTE = kv_events.TIERS
BLOCK_SIZE = 4


def chain_of(first, num_blocks):
    """Return consecutive blocks from the beginning of a prompt."""
    names = range(first, first + num_blocks)
    return [tiers.CachedBlock(n, n, None if n == first else n - 1) for n in names]


A, B = chain_of(100, 16), chain_of(200, 16)


def names_of(chain):
    return [block.sequence_hash for block in chain]


class Rig:
    """A cache over objects of two blocks, and the copies that it wants."""

    def __init__(self, num_objects=8, num_host=32, **fields):
        self.pool = pools.BlockPool(32)
        self.host = tiers.Tier(HOST, num_host, self.pool.events)
        self.below = tiers.Tier(
            fields.get("below", REMOTE), num_objects, self.pool.events, segment_blocks=2
        )
        self.cache = tiered_cache.TieredCache(
            self.pool, self.host, self.below, block_size=BLOCK_SIZE, block_bytes=1000
        )
        self.cache.cost.record_step(1000, 10.0)  # 10 ms a token, so that loading pays

    def prepare(self, waiting, chain, num_usable=None):
        self.cache.prepare(waiting, names_of(chain)[:num_usable], chain)
        return self.cache.take_copies()

    def answer(self, question, *, is_there=True, seconds=0.001):
        assert question.is_question
        failed = frozenset(() if is_there else range(len(question.blocks)))
        self.cache.record_time(self.host.now + seconds)
        self.cache.end_copy(question, failed, seconds)
        return self.cache.take_copies()

    def load(self, waiting, chain):
        """Load what host memory has of a prompt; return the tier of each block."""
        blocks = self.pool.allocate(len(chain))
        self.cache.load(waiting, names_of(chain), blocks, is_engine_busy=False)
        return [origin for copy in self.cache.take_copies() for origin in copy.origins]

    def count(self, name):
        return tier_report.make_report(self.pool, self.cache).counts[name]


def objects(copies):
    """Return which objects of two blocks these questions ask for, by position in their prompt."""
    assert all(copy.is_question for copy in copies)
    return [copy.blocks[0].sequence_hash % 100 // 2 for copy in copies]


@pytest.fixture
def rig():
    return Rig()


def test_objects_that_another_worker_has_stored_are_found_and_read(rig):
    (question,) = rig.prepare("x", A[:6])
    read, *more = rig.answer(question)
    is_waiting = rig.cache.is_preparing("x")
    rig.cache.end_copy(read, seconds=0.001)
    for last, is_there in zip(more, (True, False), strict=True):
        for copy in rig.answer(last, is_there=is_there):
            rig.cache.end_copy(copy, seconds=0.001)

    assert (question.path, objects([question])) == ((REMOTE, REMOTE), [0])
    assert (read.path, read.blocks) == ((REMOTE, HOST), tuple(A[:2]))
    assert objects(more) == [1, 2]  # twice as many after a yes
    assert is_waiting
    assert not rig.cache.is_preparing("x")
    assert rig.load("x", A[:6]) == [REMOTE] * 4
    assert (rig.count("store_questions"), rig.count("store_finds")) == (3, 2)
    stored = [e for e in rig.pool.take_events() if e.tier is REMOTE]
    assert [b.block_hash for e in stored for b in e.blocks] == names_of(A[:4])


def test_prompt_goes_on_after_a_no_and_the_object_is_asked_for_again_after_some_seconds(rig):
    (question,) = rig.prepare("x", A)
    after_no = rig.answer(question, is_there=False)
    is_waiting = rig.cache.is_preparing("x")
    at_once = rig.prepare("y", A)
    rig.cache.record_time(preparations.ASK_AGAIN_S + 1)

    assert (after_no, is_waiting, at_once) == ([], False, [])
    assert objects(rig.prepare("z", A)) == [0]


def test_prompts_with_the_same_beginning_wait_for_one_question(rig):
    (question,) = rig.prepare("x", A)
    second = rig.prepare("y", A[:4] + B[4:])
    is_waiting = rig.cache.is_preparing("y")
    (read, *_) = rig.answer(question)

    assert (second, is_waiting) == ([], True)
    assert read.path == (REMOTE, HOST)
    assert set(rig.cache.waiting_for(read)) == {"x", "y"}


def test_object_after_those_that_are_known_is_asked_for(rig):
    rig.below.restore({0: tuple(A[:2])})
    blocks = rig.pool.allocate(3)
    rig.pool.commit_chain(blocks, names_of(A[:3]), names_of(A[:3]), range(3))

    assert objects(rig.prepare("x", A)) == [1]  # the engine has half of its blocks


def test_object_after_those_that_are_read_is_asked_for_meanwhile(rig):
    rig.below.restore({0: tuple(A[:2])})
    read, question = rig.prepare("x", A)

    assert (read.path, objects([question])) == ((REMOTE, HOST), [1])


def test_last_block_of_an_object_may_be_the_end_of_the_prompt(rig):
    (question,) = rig.prepare("x", A[:2], num_usable=1)
    (read,) = rig.answer(question)

    assert read.blocks == tuple(A[:1])


def test_prompt_without_a_whole_object_asks_for_nothing(rig):
    assert rig.prepare("x", A[:1]) == []
    assert not rig.cache.is_preparing("x")


def test_prompt_goes_on_without_a_late_answer_which_the_next_one_finds(rig):
    (question,) = rig.prepare("x", A[:2])
    rig.cache.stop_waiting(question)
    is_waiting = rig.cache.is_preparing("x")
    meanwhile = rig.prepare("y", B)
    rig.answer(question, seconds=9.0)

    assert 0 < question.limit_s < 2 * BLOCK_SIZE * 0.01 / 2  # of half the time of computing
    assert (is_waiting, meanwhile) == (False, [])
    assert rig.count("late_loads") == 1
    assert [copy.path for copy in rig.prepare("z", A[:2])] == [(REMOTE, HOST)]


def test_late_answer_ends_no_wait_for_what_was_found_before(rig):
    (question,) = rig.prepare("x", A)
    read, late, _ = rig.answer(question)
    rig.cache.stop_waiting(late)
    still_waiting = rig.cache.waiting_for(read)
    rig.below.restore({0: tuple(B[:2])})

    assert still_waiting == ["x"]
    assert [copy.path for copy in rig.prepare("y", B)] == [(REMOTE, HOST)]  # and no question


def test_step_that_delays_a_late_answer_does_not_make_the_store_slow(rig):
    (question,) = rig.prepare("x", A)
    rig.cache.stop_waiting(question)
    rig.cache.record_time(9.0)  # the prompt was computed meanwhile
    rig.cache.end_copy(question, frozenset((0, 1)), 0.001)

    assert len(rig.prepare("y", B)) == 1


def test_step_for_which_an_answer_waits_counts_as_its_time(rig):
    (question,) = rig.prepare("x", A)
    rig.cache.record_time(0.03)
    rig.cache.end_copy(question, frozenset((0, 1)), 0.001)

    assert rig.prepare("y", B[:8]) == []  # it is computed in 0.32 s, of which a 16th is less


def test_slow_store_is_not_asked_until_it_may_be_quicker(rig):
    (question,) = rig.prepare("x", B)
    rig.answer(question, is_there=False, seconds=0.3)
    rig.cache.record_time(preparations.ASK_AGAIN_S + 1)
    asked = [len(rig.prepare(i, A)) for i in range(200)]

    assert asked[0] == 0
    assert sum(asked) == 1
    assert rig.count("not_worth_asking") == asked.index(1)


def test_prompt_waits_the_longer_the_more_answers_have_been_yes(rig):
    limits = []
    for position in range(4):
        rig.cache.record_time(position)
        (question, *_) = rig.prepare(position, chain_of(1000 * (position + 1), 16))
        limits.append(question.limit_s)
        rig.answer(question)

    assert limits == sorted(limits)
    assert limits[-1] > 3 * limits[0]
    assert limits[-1] < 16 * BLOCK_SIZE * 0.01 / 2


def test_reads_after_questions_end_when_loading_from_the_store_would_have(rig):
    (question,) = rig.prepare("x", A)
    rig.cache.record_time(0.3)
    (read, *_) = rig.answer(question)
    rig = Rig()
    (question,) = rig.prepare("x", A)
    rig.cache.record_time(0.4)  # half of the time of computing is over

    assert 0 < read.limit_s <= 16 * BLOCK_SIZE * 0.01 / 2 - 0.3
    assert rig.answer(question) == []
    assert not rig.cache.is_preparing("x")


def test_answer_after_all_was_cleared_is_no(rig):
    (question,) = rig.prepare("x", A)
    rig.cache.clear()
    (again,) = rig.prepare("y", A)
    first = rig.answer(question)
    is_waiting = rig.cache.is_preparing("y")

    assert (first, is_waiting) == ([], True)
    assert rig.below.find(A[0].sequence_hash) is None
    rig.answer(again)
    assert rig.below.find(A[0].sequence_hash)


def test_questions_at_once_are_bounded():
    rig = Rig(num_objects=100)
    chains = [chain_of(1000 * i, 16) for i in range(1, preparations.MAX_QUESTIONS + 3)]
    asked = [len(rig.prepare(i, chain)) for i, chain in enumerate(chains)]

    assert asked == [1] * preparations.MAX_QUESTIONS + [0, 0]


def test_object_that_was_found_longest_ago_makes_room():
    rig = Rig(num_objects=2)
    for chain in (A, B, chain_of(300, 2)):
        (question, *_) = rig.prepare(chain[0], chain[:2])
        rig.answer(question)

    found = [bool(rig.below.find(n)) for n in (100, 101, 200, 201, 300, 301)]
    assert found == [False, False, True, True, True, True]
    assert rig.below.num_used == 0  # our own slots are free


def test_object_that_was_removed_meanwhile_is_computed_and_forgotten(rig):
    (question,) = rig.prepare("x", A[:2])
    (read,) = rig.answer(question)
    rig.pool.take_events()
    rig.cache.end_copy(read, frozenset((0, 1)))
    removed = [e for e in rig.pool.take_events() if e.tier is REMOTE]

    assert not rig.cache.is_preparing("x")
    assert [sorted(e.block_hashes) for e in removed] == [[100, 101]]
    assert rig.load("x", A[:2]) == []


def test_what_others_have_stored_is_not_stored_again(rig):
    (question,) = rig.prepare("x", A[:2])
    (read,) = rig.answer(question)
    rig.cache.end_copy(read, seconds=0.001)
    rig.cache.offer(0, A[:2], 0)

    assert rig.cache.take_copies() == []


def test_disk_is_not_asked():
    rig = Rig(below=kv_events.DISK)

    assert not rig.cache.asks_store
    assert rig.prepare("x", []) == []


def test_objects_that_were_asked_for_are_remembered_for_a_while_only(rig, monkeypatch):
    monkeypatch.setattr(preparations, "MAX_REMEMBERED", 1)
    for chain in (A, B):
        (question,) = rig.prepare(chain[0], chain)
        rig.answer(question, is_there=False)

    assert objects(rig.prepare("z", A)) == [0]


def test_trace_says_what_was_asked_for_and_whether_it_was_there(rig):
    (question,) = rig.prepare("x", A)
    reads = [tier_report.describe_read(question, 1.0, 2.0, num_failed=n) for n in (0, 2)]
    reads.append(tier_report.describe_late_read(question, 2.0))

    assert [read.attributes for read in reads] == [
        {"tier": "remote", "asked_blocks": 2, "found": is_found}
        for is_found in (True, False, False)
    ]
