"""Two vLLMs: what one has computed the other answers, by vLLM's NixlConnector; and what they tell of their blocks.

They start once for all tests of this module; the last one kills the engine that prefills.
"""

import importlib.util
import os
import random

import pytest
import pytest_asyncio

import kv_params
from waiting import PATIENT_S

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("vllm and nixl are not installed here: make test-vllm", allow_module_level=True)

import processes
import vllm_models
from dynamo.base import errors
from dynamo.engine.adapters.settings import VllmConfig
from dynamo.protocols import blocks, generate, kv_events, kv_transfer
from dynamo.router import api as router_api
from dynamo.router import prefix_index
from engine_suite import Sink
from vllm_engine import ENVIRONMENT, FLAGS, adapter

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
BLOCK = 32
WORKER = router_api.Worker(1, 0)


class Side:
    """An engine, what it said, and what a router would know of it."""

    def __init__(self, engine):
        self.engine, self.sink, self.reports = engine, Sink(), []
        self.index = prefix_index.PrefixIndex()
        self.num_indexed = 0

    async def start(self):
        assert self.engine.capabilities.kv_transfer is self.engine
        before = processes.descendants(os.getpid())
        self.engine.enable_export()
        self.engine.on_import(self.reports.append)
        self.facts = await self.engine.start(self.sink)
        self.processes = processes.descendants(os.getpid()) - before
        return self

    async def answer(self, prompt, *, params=None, max_tokens=12, n=1):
        request = self.submit(prompt, params=params, max_tokens=max_tokens, n=n)
        await self.sink.until(
            lambda: (
                request.id in self.sink.errors
                or all(self.sink.has_ended(request.id, i) for i in range(n))
            )
        )
        assert request.id not in self.sink.errors, self.sink.errors
        return request.id

    def submit(self, prompt, *, params=None, max_tokens=12, n=1):
        request = generate.Request(
            id=f"r{random.getrandbits(64):x}",
            model="m",
            token_ids=blocks.pack(prompt),
            stop_conditions=generate.StopConditions(max_tokens=max_tokens, min_tokens=1),
            sampling_options=generate.SamplingOptions(temperature=0.0, n=n),
            kv_transfer_params=params,
        )
        self.engine.submit(request)
        return request

    async def prefill(self, prompt):
        """Where its blocks are, as it is handed on."""
        request_id = await self.answer(prompt, params=kv_transfer.PREFILL_ONLY, max_tokens=1)
        return kv_transfer.pass_on(self.sink.of(request_id)[-1].kv_transfer_params, 0.0, 1)

    async def tokens(self, prompt, **options):
        return self.sink.tokens(await self.answer(prompt, **options))

    async def until_all_is_told(self, unknown):
        """Events come in order: when those of a new prompt are here, all before them are."""
        await self.answer(unknown, max_tokens=1)
        await self.sink.until(lambda: self.predicted(unknown) == BLOCK)

    def cached(self, request_id):
        return self.sink.of(request_id)[0].cached_tokens

    def predicted(self, tokens):
        """How many of them a router would say are known here."""
        for event in self.sink.events[self.num_indexed :]:
            self.index.apply(WORKER, event)
        self.num_indexed = len(self.sink.events)
        return BLOCK * self.index.find_matches(names(tokens)).by_tier.get("device", {}).get(
            WORKER, 0
        )


def names(tokens):
    return blocks.sequence_hashes(blocks.local_hashes(blocks.pack(tokens), BLOCK))


def a_prompt(seed, num_tokens=100):
    return random.Random(seed).choices(range(10, 4000), k=num_tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(tmp_path_factory):
    directory = vllm_models.make(tmp_path_factory.mktemp("qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        settings = VllmConfig(engine_args=tuple(FLAGS.split()), connector=("nixl",))
        prefill, decode = (Side(adapter.build(directory, settings, "m")) for _ in range(2))
        await prefill.start()
        await decode.start()
        yield prefill, decode
        await decode.engine.stop()
        await prefill.engine.stop()


@pytest.fixture
def prefill(sides):
    return sides[0]


@pytest.fixture
def decode(sides):
    sides[1].reports.clear()
    return sides[1]


async def test_an_imported_prompt_gives_the_same_answer(prefill, decode):
    prompt = a_prompt(1)
    expected = await decode.tokens(prompt)
    await decode.engine.clear_kv_blocks()
    engine_id = await decode.engine.connect_peer(
        prefill.engine.transfer_metadata, deadline_s=PATIENT_S
    )

    params = await prefill.prefill(prompt)
    answered = await decode.answer(prompt, params=params)

    assert decode.sink.tokens(answered) == expected
    assert len(set(expected)) > 6
    (report,) = decode.reports
    assert (report.engine_id, report.num_blocks, report.error) == (engine_id, 4, None)


async def test_cached_tokens_are_those_no_engine_computed(prefill, decode):
    prompt = a_prompt(2)

    first = await decode.answer(prompt, params=await prefill.prefill(prompt))
    await decode.engine.clear_kv_blocks()
    second = await decode.answer(prompt, params=await prefill.prefill(prompt))

    assert decode.cached(first) == 0
    assert decode.cached(second) == 96


async def test_imported_blocks_are_published_as_stored(prefill, decode):
    prompt = a_prompt(3)

    await decode.answer(prompt, params=await prefill.prefill(prompt))
    await decode.sink.until(lambda: decode.predicted(prompt) == 96)

    assert decode.predicted(prompt) == 96


async def test_the_routers_predicted_overlap_is_vllms_cached_tokens(decode):
    rng = random.Random(5)
    stems = [a_prompt(seed, 128) for seed in range(10, 14)]
    await decode.engine.clear_kv_blocks()
    seen = []

    for number in range(60):
        stem = rng.choice(stems)[: rng.randrange(20, 129)]
        prompt = stem + a_prompt(1000 + number, rng.randrange(1, 60))
        await decode.until_all_is_told(a_prompt(2000 + number, BLOCK + 1))
        predicted = decode.predicted(prompt[: (len(prompt) - 1) // BLOCK * BLOCK])
        answered = await decode.answer(prompt, max_tokens=1)
        seen.append((predicted, decode.cached(answered)))

    assert [predicted for predicted, _ in seen] == [found for _, found in seen]
    assert len({found for _, found in seen}) > 3
    assert any(isinstance(event, kv_events.Removed) for event in decode.sink.events)


async def test_a_prompt_with_several_choices_is_computed_locally(prefill, decode):
    prompt = a_prompt(6)

    answered = await decode.answer(prompt, params=await prefill.prefill(prompt), n=2)

    assert decode.sink.tokens(answered, 0) == decode.sink.tokens(answered, 1)
    assert decode.reports == []


async def test_a_prompt_with_missing_remote_blocks_is_computed_locally(prefill, decode):
    prompt = a_prompt(7)
    expected = await decode.tokens(prompt)
    await decode.engine.clear_kv_blocks()
    params = await prefill.prefill(prompt)
    nowhere = kv_params.with_connector(params, remote_engine_id="gone", remote_port=1)

    tokens = await decode.tokens(prompt, params=nowhere)

    assert tokens == expected
    assert [(report.engine_id, type(report.error)) for report in decode.reports] == [
        ("gone", errors.EngineFailed)
    ]


async def test_an_aborted_import_sends_no_outputs_and_leaves_no_blocks(prefill, decode):
    prompt = a_prompt(8)
    params = await prefill.prefill(prompt)

    elsewhere = kv_params.with_connector(params, remote_engine_id="x", remote_port=1)
    request = decode.submit(prompt, params=elsewhere)
    decode.engine.abort(request.id)
    await decode.answer(a_prompt(9))

    assert decode.sink.of(request.id) == []
    assert decode.reports == []


async def test_parameters_of_another_connector_are_refused(decode):
    with pytest.raises(errors.RemoteProtocolError, match="expected vLLM's, with remote_engine_id"):
        decode.submit(a_prompt(1), params=kv_params.at_remote())


async def test_answers_survive_the_death_of_a_prefill_engine(prefill, decode):
    """They have shaken hands; then its processes are gone, with the blocks that they held."""
    prompts = [a_prompt(seed) for seed in (20, 21)]
    expected = [await decode.tokens(prompt) for prompt in prompts]
    await decode.engine.clear_kv_blocks()
    params = [await prefill.prefill(prompt) for prompt in prompts]
    processes.kill(prefill.processes)
    await prefill.sink.until(lambda: prefill.sink.deaths)

    tokens = [
        await decode.tokens(prompt, params=where)
        for prompt, where in zip(prompts, params, strict=True)
    ]

    assert tokens == expected
    assert [report.error is not None for report in decode.reports] == [True, True]
