"""Requests that go by two workers, or by one, over routers that do what the test says."""

import asyncio

import msgspec
import pytest

import kv_params
from dynamo.base import errors
from dynamo.disagg import config, metrics, policy, prefill_route
from dynamo.observability import metrics as registries
from dynamo.protocols import blocks, generate, kv_transfer, model_card, model_errors
from dynamo.router import api as routing
from dynamo.router import route
from dynamo.testing import clock as clocks

PREFILL, OTHER_PREFILL, DECODE, PLAIN, OTHER_DECODE = 1, 2, 10, 11, 12
PARAMS = kv_params.at_remote(remote_hold_s=60.0)


class Stream:
    def __init__(self):
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class Router:
    """Notes what it is asked; `script` has for each time what happens: an answer, or an error."""

    def __init__(self, *instance_ids):
        self.instance_ids, self.num_requests = frozenset(instance_ids), 0
        self.num_new, self.script = 1000, []
        self.asked, self.streams = [], []
        self.with_adapter = frozenset()
        self.previewed, self.cards = DECODE, {}

    def set_model_cards(self, cards):
        self.cards = cards

    def instances_with_lora(self, lora_name):
        return None if lora_name is None else self.instance_ids & self.with_adapter

    def min_active_requests(self, allowed=None):
        return self.num_requests if allowed is None or allowed else None

    def preview_instance(self, request, options=None):
        return self.previewed

    def estimate_load(self, request, options=route.DEFAULT_OPTIONS):
        return routing.LoadEstimate(num_new=self.num_new)

    async def open_stream(self, request, receiver, options=route.DEFAULT_OPTIONS):
        chosen = min(options.allowed_instances or self.instance_ids, default=None)
        self.asked.append((chosen, request, options))
        step = self.script.pop(0) if self.script else None
        if callable(step):
            step = await step(options)
        if isinstance(step, errors.NoWorkers):
            raise step
        if options.on_dispatched is not None:
            options.on_dispatched(chosen)
        self.streams.append(Stream())
        if isinstance(step, errors.DynamoError):
            receiver.ended(step)
        elif step is not None:
            receiver.receive(generate.Output((1,), kv_transfer_params=step))
        return self.streams[-1]


class World:
    def __init__(self, *, is_enforced=False, timeout_s=5.0):
        self.registry, self.clock = registries.Registry("x"), clocks.VirtualClock()
        self.decode, self.prefill = Router(DECODE, PLAIN), Router(PREFILL, OTHER_PREFILL)
        self.prefill.script = [PARAMS]
        self.lengths = policy.LengthPolicy(policy.LocalPrefillLimits(max_local_prefill_length=8))
        self.made = prefill_route.PrefillRoute(
            self.decode,
            self.lengths,
            config.PrefillRoutingConfig(prefill_timeout_s=timeout_s, enforce_disagg=is_enforced),
            metrics.ModelPrefillRouteMetrics(metrics.PrefillRouteMetrics(self.registry), "M"),
            self.clock,
        )
        self.made.set_model_cards({DECODE: card(model_card.WorkerType.DECODE), PLAIN: card()})
        self.made.set_prefill_router(self.prefill)
        self.told = []

    async def open(self, made=None, **options):
        options = route.RoutingOptions(on_prefilled=self.told.append, **options)
        return await self.made.open_stream(made or request(), None, options)

    @property
    def answered(self):
        """What the worker that answers was told of the prompt, and who that is."""
        (chosen, asked, _) = self.decode.asked[-1]
        return chosen, asked.kv_transfer_params

    def count(self, name, **labels):
        rows = self.registry.render().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [r for r in rows if r.startswith(f"x_{name}") and all(w in r for w in wanted)]
        return sum(float(row.rpartition(" ")[2]) for row in found)


def card(kind=model_card.WorkerType.AGGREGATED):
    return model_card.ModelCard(
        display_name="m", source_path="", context_length=99, kv_cache_block_size=4, worker_type=kind
    )


def request(length=9, **fields):
    fields = {"sampling_options": generate.SamplingOptions(n=2)} | fields
    return generate.Request(id="r", model="m", token_ids=blocks.pack(range(length)), **fields)


@pytest.fixture
def world():
    return World()


async def test_prompt_is_computed_by_one_worker_and_answered_by_another(world):
    await world.open()
    ((asked, prompt, _),) = world.prefill.asked
    chosen, params = world.answered

    assert (asked, prompt.stop_conditions.max_tokens, prompt.sampling_options.n) == (PREFILL, 1, 1)
    assert prompt.kv_transfer_params == kv_transfer.PREFILL_ONLY
    assert chosen == DECODE  # PLAIN cannot copy
    assert params == kv_params.with_remote(PARAMS, remote_hold_s=60.0 - prefill_route.DELIVERY_S)
    assert msgspec.structs.replace(world.decode.asked[0][1], kv_transfer_params=None) == request()
    assert [one.instance_id for one in world.told] == [PREFILL]
    assert world.prefill.streams[0].is_cancelled  # nobody listens any more
    assert world.count("routed_prefills_total", model="m", where="remote") == 1


@pytest.mark.parametrize(
    "made",
    [
        request(8),
        request(output_options=generate.OutputOptions(prompt_logprobs=1)),
    ],
    ids=["short", "to be scored"],
)
async def test_short_or_scored_prompt_is_local_and_says_so(world, made):
    await world.open(made)

    assert not world.prefill.asked
    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY
    assert world.count("routed_prefills_total", where="local") == 1


async def test_prefix_cached_by_the_answering_worker_does_not_count(world):
    world.decode.num_new = 8
    await world.open()

    assert not world.prefill.asked


@pytest.mark.parametrize(
    ("made", "options", "outcome", "reason"),
    [
        (request(), {}, "remote", "new to the answering worker: 9 of 9 tokens"),
        (request(8), {}, "local", "remote above 8"),
        (
            request(output_options=generate.OutputOptions(prompt_logprobs=1)),
            {},
            "local",
            "log probabilities of a prompt",
        ),
        (request(), {"instance_id": PLAIN}, "local", "no worker that may answer can copy"),
    ],
    ids=["long", "short", "to be scored", "for a worker that cannot copy"],
)
async def test_place_of_the_prompt_is_explained(world, made, options, outcome, reason):
    world.decode.num_new = made.prompt_len
    decisions = []
    await world.open(made, on_explained=lambda decision, _: decisions.append(decision), **options)
    (decision,) = decisions

    assert (decision.kind, decision.policy, decision.outcome) == (
        "prefill",
        "LengthPolicy",
        outcome,
    )
    assert reason in decision.reason


async def test_failed_remote_prompt_is_explained_as_local(world):
    world.prefill.script = [errors.WorkerLost("gone"), errors.WorkerLost("gone")]
    decisions = []
    await world.open(on_explained=lambda decision, _: decisions.append(decision))

    assert [decision.outcome for decision in decisions] == ["remote", "local"]


async def test_missing_prefill_worker_is_explained(world):
    world.prefill.instance_ids = frozenset()
    world.prefill.min_active_requests = lambda allowed=None: None
    decisions = []
    await world.open(on_explained=lambda decision, _: decisions.append(decision))

    assert "no prefill worker" in decisions[0].reason


async def test_worker_of_no_set_role_that_can_copy_counts_as_decode_worker(world):
    data = {kv_transfer.IMPORTS_KEY: True}
    runtime = model_card.ModelRuntimeConfig(runtime_data=data)
    world.made.set_model_cards({PLAIN: msgspec.structs.replace(card(), runtime_config=runtime)})
    await world.open()

    assert world.answered[0] == PLAIN
    assert kv_transfer.is_prefilled(world.answered[1])


@pytest.mark.parametrize(("num_choices", "where"), [(1, "remote"), (2, "local")])
async def test_prompt_of_several_choices_is_local_if_no_worker_copies_it(world, num_choices, where):
    """vLLM does not: the prompt would be computed twice."""
    runtime = model_card.ModelRuntimeConfig(runtime_data={kv_transfer.CHOICES_KEY: False})
    decode = msgspec.structs.replace(card(model_card.WorkerType.DECODE), runtime_config=runtime)
    world.made.set_model_cards({DECODE: decode, PLAIN: card()})
    await world.open(request(sampling_options=generate.SamplingOptions(n=num_choices)))

    assert len(world.prefill.asked) == (where == "remote")
    assert world.count("routed_prefills_total", where=where) == 1


async def test_prompt_is_local_if_too_many_wait_remotely(world):
    world.prefill.num_requests = 3
    await world.open()

    assert not world.prefill.asked


async def test_named_worker_that_cannot_import_computes_the_prompt(world):
    await world.open(instance_id=PLAIN)

    assert not world.prefill.asked
    assert world.decode.asked[0][2].instance_id == PLAIN


async def test_route_without_prefill_workers_is_the_plain_one(world):
    world.made.set_prefill_router(None)

    assert world.made.open_stream == world.decode.open_stream


async def test_route_without_importing_workers_is_the_plain_one(world):
    world.made.set_model_cards({PLAIN: card()})

    assert world.made.open_stream == world.decode.open_stream


@pytest.mark.parametrize(
    "error", [errors.WorkerLost("x"), errors.Overloaded("x"), errors.EngineFailed("x")]
)
async def test_another_prefill_worker_is_tried_once(world, error):
    world.prefill.script = [error, PARAMS]
    await world.open()

    assert [asked for asked, _, _ in world.prefill.asked] == [PREFILL, OTHER_PREFILL]
    assert world.answered[1].do_remote_prefill
    assert world.told[0].instance_id == OTHER_PREFILL
    assert world.count("routed_prefill_retries_total") == 1
    assert world.count("routed_prefill_fallbacks_total") == 0


@pytest.mark.parametrize(
    ("script", "reason", "num_asked"),
    [
        ([errors.WorkerLost("x"), errors.WorkerLost("x")], "lost", 2),
        ([errors.NoWorkers("x")], "refused", 1),
        ([errors.InvalidRequest("x")], "failed", 1),
        ([kv_transfer.COMPUTE_LOCALLY], "failed", 1),
    ],
)
async def test_failed_remote_prompt_is_computed_by_the_answering_worker(
    world, script, reason, num_asked
):
    world.prefill.script = script
    await world.open()

    assert len(world.prefill.asked) == num_asked
    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY
    assert world.count("routed_prefill_fallbacks_total", reason=reason) == 1
    assert world.count("routed_prefills_total", where="fallback") == 1
    assert not world.told


async def forever(options):
    await asyncio.Event().wait()


async def test_prompt_with_which_two_prefill_workers_died_is_computed_nowhere(world):
    world.prefill.script = [errors.WorkerDied("x")] * 2

    with pytest.raises(model_errors.SuspectRequest):
        await world.open()
    assert not world.decode.asked


async def test_late_remote_prompt_is_computed_by_the_answering_worker():
    world = World(timeout_s=5.0)
    world.prefill.script = [forever]
    opening = asyncio.ensure_future(world.open())
    await world.clock.advance(5.0)
    await opening

    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY
    assert world.count("routed_prefill_fallbacks_total", reason="late") == 1


async def test_hung_prefill_worker_is_asked_last_and_probed():
    world = World(timeout_s=5.0)
    world.prefill.script = [None, None, PARAMS]
    opening = asyncio.ensure_future(world.open())
    await world.clock.advance(5.0)
    await opening
    await world.open()
    asked = [(chosen, made.id) for chosen, made, _ in world.prefill.asked]
    await world.made.close()

    assert asked[0] == (PREFILL, "r")
    assert asked[1][1] == "r-probe"
    assert asked[2] == (OTHER_PREFILL, "r")


async def test_prompts_are_local_while_all_prefill_workers_hang():
    world = World(timeout_s=5.0)
    world.prefill.instance_ids, world.prefill.script = frozenset((PREFILL,)), [None] * 3
    opening = asyncio.ensure_future(world.open())
    await world.clock.advance(5.0)
    await opening
    await world.open()  # at once
    await world.made.close()

    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY
    assert [made.id for _, made, _ in world.prefill.asked] == ["r", "r-probe"]


async def test_undelivered_prompt_is_computed_by_the_answering_worker(world):
    world.decode.script = [forever]
    opening = asyncio.ensure_future(world.open())
    await world.clock.advance(prefill_route.DELIVERY_S)
    await opening

    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY
    assert world.count("routed_prefill_fallbacks_total", reason="undelivered") == 1


async def test_undelivered_prompt_counts_once(world):
    world.decode.script = [forever]
    opening = asyncio.ensure_future(world.open())
    await world.clock.advance(prefill_route.DELIVERY_S)
    await opening

    counts = {
        where: world.count("routed_prefills_total", where=where)
        for where in ("local", "remote", "fallback")
    }
    assert counts == {"local": 0, "remote": 0, "fallback": 1}


async def test_error_of_the_answering_worker_reaches_the_caller(world):
    world.decode.script = [errors.NoWorkers("nobody")]
    with pytest.raises(errors.NoWorkers, match="nobody"):
        await world.open()

    assert world.count("routed_prefill_fallbacks_total") == 0


async def test_prefill_ends_when_its_caller_goes(world):
    gone = []
    world.prefill.script = []
    opening = asyncio.ensure_future(world.open(add_disconnect_callback=gone.append))
    while not world.prefill.streams:
        await asyncio.sleep(0)
    gone[0]()
    with pytest.raises(errors.Cancelled):
        await opening

    assert world.prefill.streams[0].is_cancelled
    assert not world.decode.asked


async def test_enforced_remote_prefill_raises_its_failures():
    world = World(is_enforced=True)
    world.prefill.script = [errors.InvalidRequest("no")]
    with pytest.raises(errors.InvalidRequest, match="no"):
        await world.open()
    world.prefill.num_requests = None
    with pytest.raises(errors.NoWorkers, match="no prefill worker"):
        await world.open()
    world.made.set_prefill_router(None)
    with pytest.raises(errors.NoWorkers, match="no prefill worker"):
        await world.open()

    assert not world.decode.asked


async def test_prompt_of_an_adapter_goes_only_to_prefill_workers_that_have_it(world):
    world.prefill.with_adapter = {OTHER_PREFILL}
    world.prefill.script = [errors.Overloaded("full")]
    await world.open(request(lora_name="poet"))

    assert [asked for asked, _, _ in world.prefill.asked] == [OTHER_PREFILL]
    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY


async def test_prompt_of_an_adapter_that_no_prefill_worker_has_is_local(world):
    await world.open(request(lora_name="poet"))

    assert not world.prefill.asked
    assert world.answered[1] == kv_transfer.COMPUTE_LOCALLY


async def test_prompt_of_an_adapter_is_local_if_its_workers_cannot_import(world):
    world.prefill.with_adapter = {PREFILL}
    await world.open(request(lora_name="poet"), allowed_instances={PLAIN})

    assert not world.prefill.asked
    assert world.answered == (PLAIN, kv_transfer.COMPUTE_LOCALLY)


async def test_enforced_remote_prefill_refuses_an_adapter_without_prefill_workers():
    world = World(is_enforced=True)
    with pytest.raises(errors.NoWorkers, match="no prefill worker"):
        await world.open(request(lora_name="poet"))


def cut_off(*prefill_ids):
    """The card of a decode worker that cannot copy from these prefill workers."""
    data = {kv_transfer.UNREACHABLE_KEY: list(prefill_ids)}
    runtime = model_card.ModelRuntimeConfig(runtime_data=data)
    return msgspec.structs.replace(card(model_card.WorkerType.DECODE), runtime_config=runtime)


async def test_prompt_goes_to_no_prefill_worker_that_the_answering_worker_cannot_copy_from(world):
    world.made.set_model_cards({DECODE: cut_off(PREFILL), PLAIN: card()})
    await world.open()

    assert [asked for asked, _, _ in world.prefill.asked] == [OTHER_PREFILL]
    assert world.answered[0] == DECODE


async def test_prompt_is_local_while_the_answering_worker_can_copy_from_no_prefill_worker(world):
    world.made.set_model_cards({DECODE: cut_off(PREFILL, OTHER_PREFILL)})
    await world.open()
    world.made.set_model_cards({DECODE: cut_off()})
    await world.open()

    assert [params for _, made, _ in world.decode.asked if (params := made.kv_transfer_params)] == [
        kv_transfer.COMPUTE_LOCALLY,
        kv_params.with_remote(PARAMS, remote_hold_s=60.0 - prefill_route.DELIVERY_S),
    ]
    assert world.count("routed_prefill_fallbacks_total") == 0


async def test_answer_goes_to_no_worker_that_cannot_copy_its_prompt(world):
    world.made.set_model_cards({DECODE: cut_off(PREFILL), OTHER_DECODE: cut_off()})
    world.decode.previewed = OTHER_DECODE
    await world.open()

    assert world.prefill.asked[0][0] == PREFILL
    assert world.answered[0] == OTHER_DECODE


async def test_named_worker_answers_even_if_it_cannot_copy(world):
    world.made.set_model_cards({DECODE: cut_off(PREFILL), OTHER_DECODE: cut_off()})
    world.decode.previewed = OTHER_DECODE  # its card has changed since
    await world.open(instance_id=DECODE)

    assert world.answered[0] == DECODE


async def test_enforced_remote_prefill_takes_workers_that_cannot_be_copied_from():
    world = World(is_enforced=True)
    world.made.set_model_cards({DECODE: cut_off(PREFILL, OTHER_PREFILL)})
    await world.open()

    assert len(world.prefill.asked) == 1


async def test_changes_of_what_can_be_copied_are_logged(world, caplog):
    with caplog.at_level("INFO", logger=prefill_route.__name__):
        for made in (cut_off(PREFILL), cut_off(PREFILL), cut_off()):
            world.made.set_model_cards({DECODE: made})

    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"{DECODE:x} from {PREFILL:x}",
        "none",
    ]


async def test_reachability_in_another_form_is_ignored(world):
    data = {kv_transfer.UNREACHABLE_KEY: "all"}
    runtime = model_card.ModelRuntimeConfig(runtime_data=data)
    world.made.set_model_cards({DECODE: msgspec.structs.replace(cut_off(), runtime_config=runtime)})
    await world.open()

    assert world.prefill.asked[0][0] == PREFILL


def with_weights(name, kind=model_card.WorkerType.DECODE):
    return msgspec.structs.replace(card(kind), weights=name)


@pytest.fixture
def updated(world):
    """While the model is updated: a prefill and a decode worker with the old weights, and each one with new ones."""
    old, new = (with_weights(name, model_card.WorkerType.PREFILL) for name in ("old", "new"))
    world.prefill.set_model_cards({PREFILL: old, OTHER_PREFILL: new})
    world.made.set_model_cards({DECODE: with_weights("old"), OTHER_DECODE: with_weights("new")})
    world.made.set_prefill_router(world.prefill)
    return world


@pytest.mark.parametrize(
    ("answering", "computed_by"), [(DECODE, PREFILL), (OTHER_DECODE, OTHER_PREFILL)]
)
async def test_prompt_is_computed_and_answered_with_the_same_weights(
    updated, answering, computed_by
):
    updated.decode.previewed = answering
    await updated.open()

    assert [asked for asked, _, _ in updated.prefill.asked] == [computed_by]
    assert updated.decode.asked[-1][2].allowed_instances == {answering}


async def test_prompt_is_local_where_no_prefill_worker_has_the_weights():
    for is_enforced in (False, True):
        world = World(is_enforced=is_enforced)
        old = with_weights("old", model_card.WorkerType.PREFILL)
        world.prefill.set_model_cards({PREFILL: old, OTHER_PREFILL: old})
        world.made.set_model_cards({DECODE: with_weights("new")})
        world.made.set_prefill_router(world.prefill)
        if is_enforced:
            with pytest.raises(errors.NoWorkers, match="no prefill worker"):
                await world.open()
        else:
            await world.open()
            assert world.answered == (DECODE, kv_transfer.COMPUTE_LOCALLY)
        assert not world.prefill.asked


async def test_prompt_whose_decode_workers_left_meanwhile_is_computed_with_the_weights_left(
    updated,
):
    async def lose_the_old_workers(options):
        new = with_weights("new", model_card.WorkerType.PREFILL)
        updated.prefill.set_model_cards({OTHER_PREFILL: new})
        updated.made.set_model_cards({OTHER_DECODE: with_weights("new")})
        updated.made.set_prefill_router(updated.prefill)
        return PARAMS

    updated.prefill.script = [lose_the_old_workers]
    await updated.open()

    assert [asked for asked, _, _ in updated.prefill.asked] == [PREFILL]
    assert updated.answered[1] == kv_transfer.COMPUTE_LOCALLY


async def test_answer_restricted_to_workers_goes_to_no_other_decode_worker(world):
    world.made.set_model_cards({i: card(model_card.WorkerType.DECODE) for i in (DECODE, PLAIN)})

    async def lose_the_only_worker(options):
        world.made.set_model_cards({DECODE: card(model_card.WorkerType.DECODE)})
        return PARAMS

    world.prefill.script = [lose_the_only_worker]
    await world.open(allowed_instances={PLAIN}, is_restricted=True)

    assert all(options.allowed_instances == {PLAIN} for _, _, options in world.decode.asked)


def with_limit(length):
    runtime = model_card.ModelRuntimeConfig(runtime_data={kv_transfer.LOCAL_LENGTH_KEY: length})
    return msgspec.structs.replace(card(model_card.WorkerType.DECODE), runtime_config=runtime)


async def test_limit_is_that_of_the_workers_which_are_left_unless_discovery_has_one(world):
    limits = []
    for length, change in ((20, None), (9, None), (9, 5), (30, 5)):
        world.made.set_model_cards({DECODE: with_limit(length)})
        if change is not None:
            world.lengths.change_limits(policy.LimitsChange(max_local_prefill_length=change))
        limits.append(world.lengths.limits.max_local_prefill_length)
    world.lengths.change_limits(policy.LimitsChange())
    limits.append(world.lengths.limits.max_local_prefill_length)

    assert limits == [20, 9, 5, 5, 30]
