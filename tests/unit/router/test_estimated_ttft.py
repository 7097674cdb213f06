from tests.unit.router.views import chosen, prompt, view

from dynamo.router.estimated_ttft import EstimatedTtft

POLICY = EstimatedTtft()


def test_a_prompt_goes_where_it_is_known():
    assert chosen(POLICY, prompt(100), view({}, {}, cached={1: 100})) == 1


def test_a_prompt_follows_one_in_flight_that_computes_its_beginning():
    seen = view({}, {"queued": [1600]}, in_flight={1: 100})

    assert chosen(POLICY, prompt(200), seen) == 1


def test_a_long_queue_is_worth_a_second_copy():
    queues = [0, 1_000, 10_000, 100_000]

    choices = [
        chosen(POLICY, prompt(100), view({}, {"queued": [q]}, cached={1: 90})) for q in queues
    ]

    assert choices == [1, 1, 0, 0]


def test_it_waits_longer_for_its_worker_when_all_are_busy():
    def seen(num_requests):
        return view({"num_requests": num_requests}, {"queued": [6_500]}, cached={1: 90})

    assert chosen(POLICY, prompt(100), seen(0)) == 0
    assert chosen(POLICY, prompt(100), seen(1)) == 1


def test_among_many_workers_a_few_idle_ones_are_enough_to_go_elsewhere():
    def choice(num_busy, num_idle):
        busy = [{"num_requests": 1} for _ in range(num_busy)]
        idle = [{} for _ in range(num_idle)]
        home = {"queued": [6_500]}
        return chosen(POLICY, prompt(100), view(home, *busy, *idle, cached={0: 90}))

    assert choice(5, 2) == 0  # a quarter is idle, and the home is waited for
    assert choice(599, 200) != 0  # a quarter is idle, and that is plenty


def test_what_is_new_anyway_goes_to_the_cache_that_took_in_least():
    assert (
        chosen(POLICY, prompt(), view({"inserted_tokens": 900.0}, {"inserted_tokens": 100.0})) == 1
    )


def test_an_idle_worker_is_better_than_one_that_decodes():
    assert chosen(POLICY, prompt(), view({"num_requests": 1}, {})) == 1


def test_a_prefix_that_everybody_asks_for_spreads():
    def choice(num_at_home):
        crowd = {"num_requests": num_at_home}
        return chosen(
            POLICY, prompt(128), view(crowd, *({"num_requests": 1},) * 3, cached={0: 126})
        )

    assert [choice(n) for n in (1, 8, 60)] == [0, 0, 1]


def test_requests_that_wait_for_a_worker_in_the_router_count_as_its_queue():
    assert chosen(POLICY, prompt(), view({"reserved_tokens": 100.0}, {})) == 1


def test_it_says_what_it_expects_to_find():
    decision = POLICY.select_worker(
        prompt(100), view({}, {}, cached={1: 50}, in_flight={1: 60}), 0.0
    )

    assert decision.overlap_blocks == 60
