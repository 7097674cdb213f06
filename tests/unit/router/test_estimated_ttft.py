from tests.unit.router.views import chosen, prompt, view

from dynamo.router.estimated_ttft import EstimatedTtft

POLICY = EstimatedTtft()


def test_prompt_goes_to_the_worker_with_its_prefix():
    assert chosen(POLICY, prompt(100), view({}, {}, cached={1: 100})) == 1


def test_prompt_follows_a_request_in_flight_with_its_prefix():
    seen = view({}, {"queued": [1600]}, in_flight={1: 100})

    assert chosen(POLICY, prompt(200), seen) == 1


def test_a_long_queue_is_worth_a_second_copy():
    queues = [0, 1_000, 10_000, 100_000]

    choices = [
        chosen(POLICY, prompt(100), view({}, {"queued": [q]}, cached={1: 90})) for q in queues
    ]

    assert choices == [1, 1, 0, 0]


def test_prompt_accepts_a_longer_queue_when_all_workers_are_busy():
    def seen(num_requests):
        return view({"num_requests": num_requests}, {"queued": [6_500]}, cached={1: 90})

    assert chosen(POLICY, prompt(100), seen(0)) == 0
    assert chosen(POLICY, prompt(100), seen(1)) == 1


def test_few_idle_workers_among_many_are_enough_to_leave_the_prefix():
    def choice(num_busy, num_idle):
        busy = [{"num_requests": 1} for _ in range(num_busy)]
        idle = [{} for _ in range(num_idle)]
        home = {"queued": [6_500]}
        return chosen(POLICY, prompt(100), view(home, *busy, *idle, cached={0: 90}))

    assert choice(5, 2) == 0  # a quarter is idle, and the home is waited for
    assert choice(599, 200) != 0  # a quarter is idle, and that is plenty


def test_new_prompt_goes_to_the_cache_with_least_insertions():
    assert (
        chosen(POLICY, prompt(), view({"inserted_tokens": 900.0}, {"inserted_tokens": 100.0})) == 1
    )


def test_idle_worker_is_preferred_to_a_decoding_one():
    assert chosen(POLICY, prompt(), view({"num_requests": 1}, {})) == 1


def test_popular_prefix_spreads_over_workers():
    def choice(num_at_home):
        crowd = {"num_requests": num_at_home}
        return chosen(
            POLICY, prompt(128), view(crowd, *({"num_requests": 1},) * 3, cached={0: 126})
        )

    assert [choice(n) for n in (1, 8, 60)] == [0, 0, 1]


def test_queued_requests_count_at_the_worker_they_wait_for():
    assert chosen(POLICY, prompt(), view({"reserved_tokens": 100.0}, {})) == 1


def test_decision_carries_the_expected_overlap():
    decision = POLICY.select_worker(
        prompt(100), view({}, {}, cached={1: 50}, in_flight={1: 60}), 0.0
    )

    assert decision.overlap_blocks == 60
