"""The native engine's thread and the event loop, around parts that compute nothing."""

import asyncio
import threading

import msgspec
import pytest

import kv_params
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native import engine as engines
from dynamo.engine.native.assemble import Assembly
from dynamo.engine.native.scheduler import Scheduler, SchedulerLimits
from dynamo.engine.native.sequence import Paging, Sampled
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, generate
from waiting import PATIENT_S

FACTS = api.EngineFacts(
    context_length=64,
    kv_block_size=4,
    total_kv_blocks=16,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    supports_guided=True,
)


class HeldRunner:
    """Computes a step when `may_run` is released; the token that it draws is the sequence's first."""

    def __init__(self):
        self.may_run = threading.Semaphore(0)
        self.is_running = threading.Semaphore(0)
        self.forgotten = []
        self.grammars = HeldGrammars()

    def run(self, chunks):
        self.is_running.release()
        assert self.may_run.acquire(timeout=PATIENT_S)
        return [self.draw(chunk.sequence) if chunk.samples else None for chunk in chunks]

    def draw(self, sequence):
        first = sequence.token_ids[0]
        return errors.EngineFailed("no token") if first == 13 else Sampled(token_id=first)

    def forget(self, sequence):
        self.forgotten.append(sequence.request.id)


class Sink:
    def __init__(self):
        self.said = asyncio.Queue()

    def outputs(self, batch):
        self.said.put_nowait([(item.request_id, item.output.token_ids) for item in batch])

    def failed(self, request_id, error):
        self.said.put_nowait((request_id, str(error)))

    def kv_events(self, events):
        pass

    def died(self, error):
        self.said.put_nowait(str(error))

    async def next(self):
        async with asyncio.timeout(PATIENT_S):
            return await self.said.get()


class HeldGrammars:
    """Compilations that end when the test says so."""

    def __init__(self):
        self.running = []
        self.is_closed = False

    async def compile(self, guided, eos):
        self.running.append(asyncio.get_running_loop().create_future())
        return await self.running[-1]

    async def close(self):
        self.is_closed = True


class AnyText:
    """A grammar that allows all tokens and has no guide."""

    def begin(self):
        raise AssertionError("the runner of these tests uses no guides")


def fake_assembly(runner):
    paging = Paging(num_blocks=16, block_size=4, prefix_caching=True)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, context_length=64)
    return Assembly(
        facts=FACTS,
        vocab_size=100,
        scheduler=Scheduler(paging, limits),
        runner=runner,
        grammars=runner.grammars,
    )


@pytest.fixture
def runner(monkeypatch):
    runner = HeldRunner()
    monkeypatch.setattr(engines, "assemble", lambda path, settings, allocate: fake_assembly(runner))
    return runner


@pytest.fixture
async def engine(runner, tmp_path):
    engine = engines.NativeEngine(tmp_path, NativeConfig())
    engine.sink = Sink()
    await engine.start(engine.sink)
    yield engine
    runner.may_run.release(100)
    await engine.stop()


def make_request(request_id, token, max_tokens=9, guided=None):
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack([token]),
        stop_conditions=generate.StopConditions(max_tokens=max_tokens),
        sampling_options=generate.SamplingOptions(guided_decoding=guided),
        eos_token_ids=(2,),
    )


def wait_for_step(runner):
    assert runner.is_running.acquire(timeout=PATIENT_S)


class Panic(BaseException):
    """No Exception, as what libraries in Rust raise for a fault of their own."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_whatever_ends_the_thread_is_reported_as_the_death_of_the_engine(
    engine, runner, monkeypatch, kind
):
    def break_down(chunks):
        raise kind("it broke")

    monkeypatch.setattr(runner, "run", break_down)
    engine.submit(make_request("a", 5))

    assert await engine.sink.next() == f"the engine's loop died: {kind.__name__}: it broke"
    with pytest.raises(errors.EngineFailed, match="it broke"):
        engine.submit(make_request("b", 5))


async def test_a_missing_model_raises_config_error(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        await engines.NativeEngine(tmp_path / "nothing", NativeConfig()).start(Sink())


async def test_a_failure_to_load_is_in_the_error_message(tmp_path, monkeypatch):
    def break_down(path, settings, allocate):
        raise MemoryError("not so much")

    monkeypatch.setattr(engines, "assemble", break_down)
    with pytest.raises(errors.EngineFailed, match="could not be loaded: MemoryError: not so much"):
        await engines.NativeEngine(tmp_path, NativeConfig()).start(Sink())


async def test_a_cancelled_start_leaves_no_thread(tmp_path, monkeypatch):
    may_load, runner = threading.Event(), HeldRunner()

    def load(path, settings, allocate):
        assert may_load.wait(PATIENT_S)
        return fake_assembly(runner)

    monkeypatch.setattr(engines, "assemble", load)
    engine = engines.NativeEngine(tmp_path, NativeConfig())
    starting = asyncio.ensure_future(engine.start(Sink()))
    await asyncio.sleep(0)
    (thread,) = (t for t in threading.enumerate() if t.name == "engine")
    starting.cancel()
    may_load.set()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.to_thread(thread.join, PATIENT_S)

    assert not thread.is_alive()


async def test_a_reused_request_id_gets_no_outputs_of_the_aborted_request(engine, runner):
    engine.submit(make_request("a", 1))
    wait_for_step(runner)
    engine.abort("a")
    engine.submit(make_request("a", 2, max_tokens=1))
    runner.may_run.release(2)

    assert await engine.sink.next() == [("a", (2,))]
    assert runner.forgotten == ["a", "a"]


async def test_a_failed_request_does_not_fail_others(engine, runner):
    engine.submit(make_request("good", 1, max_tokens=2))
    wait_for_step(runner)
    engine.submit(make_request("bad", 13))
    runner.may_run.release(2)
    said = [await engine.sink.next() for _ in range(3)]

    assert said == [[("good", (1,))], [("good", (1,))], ("bad", "no token")]
    engine.submit(make_request("bad", 1))


GUIDED = generate.GuidedDecoding(regex="a")


async def end_compilation(runner, result):
    while not runner.grammars.running:
        await asyncio.sleep(0)
    compilation = runner.grammars.running.pop(0)
    if isinstance(result, Exception):
        compilation.set_exception(result)
    else:
        compilation.set_result(result)


async def test_other_requests_are_answered_while_a_grammar_is_compiled(engine, runner):
    engine.submit(make_request("guided", 5, max_tokens=1, guided=GUIDED))
    engine.submit(make_request("free", 7, max_tokens=1))
    runner.may_run.release(2)
    first = await engine.sink.next()
    await end_compilation(runner, AnyText())

    assert first == [("free", (7,))]
    assert await engine.sink.next() == [("guided", (5,))]


async def test_a_failed_compilation_fails_its_request(engine, runner):
    engine.submit(make_request("guided", 5, guided=GUIDED))
    await end_compilation(runner, errors.InvalidRequest("no such pattern"))

    assert await engine.sink.next() == ("guided", "no such pattern")
    engine.submit(make_request("guided", 5, guided=GUIDED))  # its id is free again


async def test_failed_compilation_releases_the_blocks_that_another_engine_keeps(engine, runner):
    expected = engine._exchange._importer._expected
    request = make_request("guided", 5, guided=GUIDED)
    engine.submit(msgspec.structs.replace(request, kv_transfer_params=kv_params.at_remote()))
    before = list(expected)
    await end_compilation(runner, errors.InvalidRequest("no such pattern"))
    await engine.sink.next()

    assert before == ["guided"]
    assert not expected


async def test_fault_of_the_program_fails_the_request_that_waits_for_its_grammar(engine, runner):
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    engine.submit(make_request("guided", 5, guided=GUIDED))
    await end_compilation(runner, ZeroDivisionError("a fault"))

    assert await engine.sink.next() == ("guided", "no grammar: ZeroDivisionError('a fault')")
    engine.submit(make_request("guided", 5, guided=GUIDED))  # its id is free again


@pytest.mark.parametrize("abort", ["abort", "abort_choice"])
async def test_abort_ends_the_wait_for_a_grammar(engine, runner, abort):
    engine.submit(make_request("guided", 5, guided=GUIDED))
    await asyncio.sleep(0)
    (compilation,) = runner.grammars.running
    getattr(engine, abort)("guided", *([0] if abort == "abort_choice" else []))
    await asyncio.sleep(0)
    engine.submit(make_request("free", 7, max_tokens=1))
    runner.may_run.release()

    assert compilation.cancelled()
    assert await engine.sink.next() == [("free", (7,))]


async def test_stop_ends_the_wait_for_a_grammar(engine, runner):
    engine.submit(make_request("guided", 5, guided=GUIDED))
    await asyncio.sleep(0)
    await engine.stop()

    assert runner.grammars.running[0].cancelled()
    assert runner.grammars.is_closed
