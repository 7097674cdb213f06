from tests.unit.router.views import chosen, prompt, view

from dynamo.router import cost_function


def draw():
    return 0.0


def documented():
    """Three workers with 8, 5 and 2 blocks to compute and 10, 5 and 9 in use, as the documents have them.

    The prompt has ten blocks, of which 2, 5 and 8 are cached; they are in use by others, so none is new.
    """
    return view(
        {"active_blocks": 10},
        {"active_blocks": 5},
        {"active_blocks": 9},
        cached={0: 2, 1: 5, 2: 8},
        in_flight={0: 10, 1: 10, 2: 10},
    )


def test_the_documents_example_selects_the_second_worker():
    decision = cost_function.Dynamo(draw=draw).select_worker(prompt(), documented(), 0.0)

    assert (decision.worker.instance_id, decision.overlap_blocks) == (1, 5)


def test_a_larger_weight_prefers_what_is_cached():
    assert chosen(cost_function.Dynamo(draw=draw, overlap_weight=2.0), prompt(), documented()) == 2


def test_blocks_of_requests_in_flight_are_not_new():
    seen = view({"active_blocks": 5}, {"active_blocks": 5}, in_flight={1: 3})

    assert chosen(cost_function.Dynamo(draw=draw), prompt(), seen) == 1


def test_queued_prefill_counts():
    assert chosen(cost_function.Dynamo(draw=draw), prompt(), view({"queued": [16]}, {})) == 1


def test_lmetric_takes_the_lowest_product():
    seen = view({"active_blocks": 0}, {"active_blocks": 30}, cached={1: 9}, in_flight={1: 9})

    assert chosen(cost_function.LMetric(draw=draw), prompt(), seen) == 1
