"""The policy of migration, and the requests for the rest of an answer."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend import migration
from dynamo.protocols import blocks, generate

RULES = migration.MigrationPolicy(limit=2, max_seq_len=10)
Verdict = migration.MigrationVerdict


def request(n=1, **stop):
    return generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack((1, 2, 3)),
        stop_conditions=generate.StopConditions(**{"max_tokens": 8} | stop),
        sampling_options=generate.SamplingOptions(n=n, seed=5),
        output_options=generate.OutputOptions(logprobs=1, prompt_logprobs=1),
    )


DEATH, FULL = errors.WorkerDied("gone"), errors.Overloaded("full")


def verdict(rules=RULES, limit=2, num_moves=0, error=DEATH, num_deaths=0, **facts):
    known = {"is_prepared": True, "has_others": False, "seq_len": 10} | facts
    loss = migration.Loss(error=error, num_migrations=num_moves, num_deaths=num_deaths, **known)
    return rules.judge(loss, limit)


def test_request_migrates_as_often_as_the_limit_allows():
    verdicts = [verdict(num_moves=num) for num in range(4)]

    assert verdicts == [Verdict.MIGRATE, Verdict.MIGRATE, Verdict.EXHAUSTED, Verdict.EXHAUSTED]


def test_limit_of_zero_forbids_migration():
    assert verdict(limit=0) is Verdict.NOT_ALLOWED


def test_too_long_request_does_not_migrate():
    assert verdict(seq_len=11) is Verdict.TOO_LONG
    assert verdict(migration.MigrationPolicy(), seq_len=10**6) is Verdict.MIGRATE


@pytest.mark.parametrize(
    ("num_moves", "has_others", "expected"),
    [(0, False, Verdict.NOT_LOST), (0, True, Verdict.MIGRATE), (1, False, Verdict.MIGRATE)],
)
def test_request_that_a_full_worker_refuses_migrates_if_it_has_moved_or_may_move(
    num_moves, has_others, expected
):
    assert verdict(error=FULL, num_moves=num_moves, has_others=has_others) is expected


def test_request_that_an_engine_cannot_serve_does_not_migrate():
    assert verdict(error=errors.InvalidRequest("no"), has_others=True) is Verdict.NOT_LOST


def test_suspect_does_not_migrate_even_where_migration_is_off():
    assert verdict(num_deaths=2, limit=0) is Verdict.SUSPECT
    assert verdict(num_deaths=1, is_prepared=False) is Verdict.SUSPECT


def test_card_can_lower_the_limit_and_not_raise_it():
    assert [RULES.limit_of(one) for one in (None, 0, 1, 9)] == [2, 0, 1, 2]


def test_request_without_tokens_is_sent_again_unchanged():
    asked = request(n=2)

    assert migration.remaining_requests(asked, {0: b"", 1: b""}) == {0: asked}


def test_open_choices_become_requests_of_their_own():
    found = migration.remaining_requests(request(n=3), {0: blocks.pack((7,)), 2: b""})

    assert {choice: one.num_resumed for choice, one in found.items()} == {0: 1, 2: 0}
    assert {choice: one.first_choice for choice, one in found.items()} == {0: 0, 2: 2}
    assert {one.sampling_options.n for one in found.values()} == {1}
    assert {one.output_options for one in found.values()} == {generate.OutputOptions(logprobs=1)}


@given(st.integers(1, 8), st.integers(0, 9), st.one_of(st.none(), st.integers(8, 20)))
def test_token_limits_count_over_both_workers(num_answered, min_tokens, max_tokens):
    asked = request(min_tokens=min_tokens, max_tokens=max_tokens)
    tokens = tuple(range(100, 100 + num_answered))

    (rest,) = migration.remaining_requests(asked, {0: blocks.pack(tokens)}).values()

    assert blocks.unpack(rest.token_ids) == [1, 2, 3, *tokens]
    assert rest.num_resumed == num_answered
    left = rest.stop_conditions
    assert left.max_tokens == (None if max_tokens is None else max_tokens - num_answered)
    assert left.min_tokens == max(0, min_tokens - num_answered)
    assert migration.has_no_tokens_left(rest) is (max_tokens == num_answered)
    assert msgspec.structs.replace(rest, token_ids=asked.token_ids).sampling_options.seed == 5
