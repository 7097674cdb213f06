import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner import profile_sweep
from dynamo.planner.policies import Targets
from dynamo.planner.profile_sweep import Cell, CellResult, EngineSize
from planner_cases import make_profile

SIZE = EngineSize(num_kv_tokens=100_000, max_num_seqs=64, context_length=8192)


@given(
    st.integers(5000, 500_000), st.integers(1, 256), st.integers(1, 20_000), st.integers(2, 2000)
)
def test_cells_fit_the_engine_and_are_unique(num_kv_tokens, max_num_seqs, isl, osl):
    size = EngineSize(num_kv_tokens=num_kv_tokens, max_num_seqs=max_num_seqs, context_length=4096)
    cells = profile_sweep.plan_cells(size, isl, osl)

    assert len(set(cells)) == len(cells)
    assert {cell.kind for cell in cells} == {"prefill", "decode"}
    assert all(cell.concurrency <= max_num_seqs for cell in cells)
    assert all(cell.context + osl < 4096 or cell.context == 16 for cell in cells)


def test_corners_of_decode_come_first():
    decode = [c for c in profile_sweep.plan_cells(SIZE, 1000, 50) if c.kind == "decode"]

    assert decode[0].concurrency == 1
    assert decode[1].context == max(cell.context for cell in decode)


def test_larger_cell_than_a_failed_one_is_not_tried():
    failed = [CellResult(cell=Cell("decode", 1000, 8), failure="no memory")]

    assert profile_sweep.must_fail(Cell("decode", 1000, 16), failed)
    assert profile_sweep.must_fail(Cell("decode", 2000, 8), failed)
    assert not profile_sweep.must_fail(Cell("decode", 500, 16), failed)
    assert not profile_sweep.must_fail(Cell("prefill", 2000), failed)


def lose(*cell):
    return CellResult(cell=Cell(*cell), failure="killed", is_worker_lost=True)


def test_lost_worker_costs_one_cell_and_two_of_them_all_larger_cells():
    larger = Cell("decode", 2000, 16)

    assert not profile_sweep.must_fail(larger, [lose("decode", 1000, 8)])
    assert profile_sweep.must_fail(larger, [lose("decode", 1000, 8), lose("decode", 2000, 8)])
    assert not profile_sweep.must_fail(larger, [lose("decode", 1000, 8), lose("decode", 4000, 8)])


def test_failure_below_a_measured_cell_says_nothing_of_larger_ones():
    results = [CellResult(cell=Cell("decode", 1000, 8), failure="no answer")]
    results.append(CellResult(cell=Cell("decode", 2000, 32), seconds=0.1))

    assert not profile_sweep.must_fail(Cell("decode", 2000, 16), results)


def measure(*cells):
    return [CellResult(cell=Cell(*cell), seconds=0.1) for cell in cells]


def test_recommendation_needs_prompts_around_the_request_and_decoding_of_several_sequences():
    cells = profile_sweep.plan_cells(SIZE, 1000, 50)
    prefill = measure(("prefill", 500), ("prefill", 2000))
    single = measure(*(("decode", context, 1) for context in (250, 1000, 2000)))
    several = measure(("decode", 1000, 8))

    assert profile_sweep.find_missing(prefill + single[:2] + several, cells, 1000) == []
    assert profile_sweep.find_missing(prefill[:1] + single, cells, 1000) == [
        "a prompt of 1000 tokens or more",
        "the decoding of several sequences",
    ]
    assert profile_sweep.find_missing([lose("prefill", 500), *several], cells, 1000) == [
        "a prompt of 1000 tokens or fewer",
        "a prompt of 1000 tokens or more",
        "2 more decode cells",
    ]


def test_engine_of_one_sequence_and_a_short_context_can_have_a_recommendation():
    size = EngineSize(num_kv_tokens=1000, max_num_seqs=1, context_length=1000)
    cells = profile_sweep.plan_cells(size, 5000, 50)
    results = [CellResult(cell=cell, seconds=0.1) for cell in cells]

    assert profile_sweep.find_missing(results, cells, 5000) == []


def test_failed_cell_costs_that_cell_only():
    results = [
        CellResult(cell=Cell("prefill", 1000), seconds=0.1),
        CellResult(cell=Cell("prefill", 2000), failure="no memory"),
        CellResult(cell=Cell("decode", 1000, 10), seconds=0.02),
    ]
    profile = profile_sweep.make_profile(results, SIZE, osl=100)

    assert profile.prefill.isl == (1000,)
    assert profile.decode.points[0].kv_usage == pytest.approx(10 * 1050 / 100_000)
    assert profile.decode.points[0].throughput == pytest.approx(500)


def test_no_profile_without_a_decode_cell():
    results = [CellResult(cell=Cell("prefill", 1000), seconds=0.1)]

    assert profile_sweep.make_profile(results, SIZE, osl=100) is None


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_recommendation_uses_all_workers_and_no_more(num_workers):
    choice = profile_sweep.recommend(
        make_profile(), isl=1000, osl=100, targets=Targets(), num_workers=num_workers
    )

    assert choice.num_prefill + choice.num_decode == num_workers
    assert choice.requests_per_s > 0


def test_recommendation_says_which_target_cannot_be_met():
    choice = profile_sweep.recommend(
        make_profile(), isl=1000, osl=100, targets=Targets(ttft_s=0.01), num_workers=2
    )

    assert "TTFT" in choice.unreachable
