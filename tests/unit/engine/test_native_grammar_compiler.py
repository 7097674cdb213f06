"""Compilation under limits: what a hostile grammar costs, what is shared, and what ends with its requests."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from dynamo.base import errors
from dynamo.engine import trials
from dynamo.engine.adapters.vllm import grammars
from dynamo.engine.native import grammar_compiler
from dynamo.engine.native.grammar_compiler import GrammarCompiler
from dynamo.protocols import generate
from guided import EOS, STORYTELLER
from waiting import PATIENT_S

VOCAB = 4096
ENDLESS = {"type": "integer", "multipleOf": 62615533}
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]}


_start = subprocess.Popen


def change_limits(monkeypatch, **limits):
    """Change the limits in the processes that compile: on a busy machine two seconds of a processor take minutes."""
    code = (
        "import sys; from dynamo.engine.native import grammar_compiler as g;"
        f" g.LIMITS = g.LIMITS._replace(**{limits | {'wall_s': 600}}); g.main(sys.argv[1:])"
    )
    monkeypatch.setattr(
        trials.subprocess,
        "Popen",
        lambda command, **options: _start([sys.executable, "-c", code, *command[3:]], **options),
    )


@pytest.fixture
async def compiler(monkeypatch):
    change_limits(monkeypatch)
    compiler = GrammarCompiler(STORYTELLER / "tokenizer.json", VOCAB)
    yield compiler
    async with asyncio.timeout(PATIENT_S):
        await compiler.close()


def schema(content):
    return generate.GuidedDecoding(json=json.dumps(content), param="response_format")


def regex(pattern):
    return generate.GuidedDecoding(regex=pattern)


def children_of(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("content", [ENDLESS, PATTERNS], ids=["multipleOf", "patterns"])
async def test_grammar_without_end_is_refused_by_its_processor_time(compiler, content):
    with pytest.raises(errors.InvalidRequest, match=r"more than 2 s of processor time") as caught:
        await compiler.compile(schema(content), EOS)

    assert caught.value.param == "response_format"


async def test_other_grammars_are_compiled_while_one_has_no_end(compiler):
    endless = asyncio.create_task(compiler.compile(schema(ENDLESS), EOS))
    await compiler.compile(regex("ab"), EOS)

    assert not endless.done()
    endless.cancel()


async def test_refusal_is_cached(compiler):
    with pytest.raises(errors.InvalidRequest):
        await compiler.compile(regex("(ab"), EOS)
    await compiler.close()  # another trial is not possible
    with pytest.raises(errors.InvalidRequest, match="unclosed group"):
        await compiler.compile(regex("(ab"), EOS)


async def test_trial_ends_when_the_last_of_its_requests_leaves(compiler):
    await compiler.compile(regex("a"), EOS)
    server = compiler._trials._process.pid
    first, second = (asyncio.create_task(compiler.compile(schema(ENDLESS), EOS)) for _ in range(2))
    await until(lambda: len(children_of(server)) == 2)  # one waits for the next trial
    first.cancel()
    await asyncio.wait([first])
    assert len(children_of(server)) == 2
    second.cancel()

    await until(lambda: len(children_of(server)) == 1)


async def test_close_ends_trials_and_their_process(compiler):
    await compiler.compile(regex("a"), EOS)
    server = compiler._trials._process.pid
    endless = asyncio.create_task(compiler.compile(schema(ENDLESS), EOS))
    await until(lambda: len(children_of(server)) == 2)
    children = children_of(server)
    await compiler.close()

    assert endless.cancelled() or endless.cancelling() or endless.done()
    assert not pathlib.Path(f"/proc/{server}").exists()
    assert not any(pathlib.Path(f"/proc/{child}").exists() for child in children)


async def test_requests_with_one_constraint_share_its_grammar(compiler):
    grammars = await asyncio.gather(*(compiler.compile(regex("a"), EOS) for _ in range(3)))

    assert len(set(map(id, grammars))) == 1
    assert await compiler.compile(regex("a"), EOS) is grammars[0]


async def test_least_recently_used_grammar_leaves_the_cache(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 2)
    first = await compiler.compile(regex("a"), EOS)
    second = await compiler.compile(regex("b"), EOS)
    await compiler.compile(regex("a"), EOS)
    await compiler.compile(regex("c"), EOS)

    assert await compiler.compile(regex("a"), EOS) is first
    assert await compiler.compile(regex("b"), EOS) is not second


async def test_another_end_token_compiles_another_grammar(compiler):
    first = await compiler.compile(regex("a"), EOS)

    assert await compiler.compile(regex("a"), (1,)) is not first


async def test_killed_process_is_started_again(compiler):
    await compiler.compile(regex("a"), EOS)
    os.kill(compiler._trials._process.pid, signal.SIGKILL)
    await until(lambda: compiler._trials.has_ended)

    await compiler.compile(regex("b"), EOS)


async def test_child_that_was_killed_while_it_waited_is_replaced(compiler):
    await compiler.compile(regex("a"), EOS)
    server = compiler._trials._process.pid
    await until(lambda: len(children_of(server)) == 1)
    (child,) = children_of(server)
    os.kill(int(child), signal.SIGKILL)
    await until(lambda: ") Z " in pathlib.Path(f"/proc/{child}/stat").read_text())

    await compiler.compile(regex("b"), EOS)


async def test_trial_that_was_killed_is_no_fault_of_the_grammar(compiler, monkeypatch):
    verdicts = [trials.Verdict(ended_by=signal.SIGKILL), trials.Verdict()]

    async def attempt(process, guided):
        return verdicts.pop(0)

    monkeypatch.setattr(trials.TrialProcess, "attempt", attempt)
    with pytest.raises(errors.Overloaded, match=r"signal 9 .* try later"):
        await compiler.compile(regex("a"), EOS)

    await compiler.compile(regex("a"), EOS)


async def test_too_many_compilations_are_refused(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 1)
    waiting = asyncio.create_task(compiler.compile(regex("a"), EOS))
    await asyncio.sleep(0)
    with pytest.raises(errors.Overloaded, match="try later"):
        await compiler.compile(regex("b"), EOS)
    await waiting

    await compiler.compile(regex("b"), EOS)


async def test_grammar_that_needs_too_much_memory_is_refused(compiler, monkeypatch):
    change_limits(monkeypatch, memory=2**26, cpu_s=60)
    with pytest.raises(errors.InvalidRequest, match="MiB of memory"):
        await compiler.compile(schema(ENDLESS), EOS)


async def test_unreadable_tokenizer_fails_the_request(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "Morse"}}')
    compiler = GrammarCompiler(path, VOCAB)

    assert compiler.is_possible
    with pytest.raises(errors.EngineFailed, match="llguidance does not read"):
        await compiler.compile(regex("a"), EOS)
    await compiler.close()


def test_model_without_a_tokenizer_has_no_grammars(tmp_path):
    assert not GrammarCompiler(tmp_path / "none", VOCAB).is_possible


def test_system_on_which_no_trial_can_be_ended_has_no_grammars(monkeypatch):
    monkeypatch.setattr(grammar_compiler.sys, "platform", "darwin")

    assert not GrammarCompiler(STORYTELLER / "tokenizer.json", VOCAB).is_possible


@pytest.mark.parametrize(
    "limits", [grammar_compiler.LIMITS, grammars.LIMITS], ids=["native", "vllm"]
)
def test_endless_grammar_is_refused_by_its_processor_time_on_a_busy_machine_too(limits):
    """A client that is told to try later would send it again and again."""
    num_processes_a_core = 50

    assert limits.wall_s > num_processes_a_core * limits.cpu_s


def test_trial_that_got_no_processor_is_no_fault_of_the_request():
    verdict = trials.Verdict(ended_by=signal.SIGALRM)

    with pytest.raises(errors.Overloaded, match="try later"):
        verdict.check(regex("a"), grammar_compiler.LIMITS)


def test_compilations_that_begin_together_both_get_the_large_stack(monkeypatch):
    sizes, first_starts, second_comes = [], threading.Event(), threading.Event()

    class SlowThread(threading.Thread):
        def start(self):
            if not first_starts.is_set():
                first_starts.set()
                second_comes.wait(PATIENT_S)
            time.sleep(0.1)  # in which the other one may change the size
            sizes.append(threading.stack_size())
            super().start()

    def compile_second():
        first_starts.wait(PATIENT_S)
        second_comes.set()
        trials.run_deep(int)

    former_size, second = threading.stack_size(), threading.Thread(target=compile_second)
    second.start()
    monkeypatch.setattr(trials.threading, "Thread", SlowThread)
    trials.run_deep(int)
    second.join()

    assert sizes == [trials.STACK_BYTES] * 2
    assert threading.stack_size() == former_size
