"""`dynamo run`, as a user meets it: in a terminal, in a pipe, over a file."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import httpx
import pytest
from deployment import MODEL, chat

import ports
from waiting import PATIENT_S, eventually

DYNAMO = [sys.executable, "-m", "dynamo.cli"]


def run(deployment, *arguments, text=""):
    return subprocess.run(
        [*DYNAMO, "run", *arguments],
        env=deployment.environ,
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )


# Make standard input the terminal that controls this session, as a login does, and become the command. A shell lets
# what it runs in the background ignore Ctrl-C, so the tests may do.
IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A person at a pseudo-terminal."""

    def __init__(self, deployment, *arguments):
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 300))  # no line that is awaited is broken
        # a readline in this process may have set them for its own terminal
        sizes = ("COLUMNS", "LINES")
        environ = {k: v for k, v in deployment.environ.items() if k not in sizes}
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *DYNAMO, "run", *arguments],
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text):
        os.write(self._terminal, text.encode())

    def await_text(self, text, within_s=PATIENT_S):
        """Read until `text` has come; what was read before it is forgotten."""
        deadline = time.monotonic() + within_s
        while text not in self.seen:
            assert time.monotonic() < deadline, f"expected {text!r}, saw {self.seen!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.seen += os.read(self._terminal, 4096).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def exit_code(self):
        return self._process.wait(PATIENT_S)

    def end(self):
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(deployment):
    terminals = []

    def open_terminal(*arguments):
        terminals.append(Terminal(deployment, *arguments))
        return terminals[-1]

    yield open_terminal
    for opened in terminals:
        opened.end()


def test_prompt_on_standard_input_is_answered(deployment):
    answer = run(deployment, "in=stdin", "--max-tokens", "60", text="Tell me a story about a fox")

    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout) > 40


def test_conversation_in_the_terminal_keeps_its_history(terminal):
    person = terminal("out=mocker", "--max-tokens", "8")
    person.await_text("> ")
    person.type("hello\n")
    person.await_text("hello")
    first = person.await_text("> ")
    person.type("and then?\n")
    person.await_text("and then?")
    second = person.await_text("> ")
    person.type("\x04")

    assert first.strip()
    assert second.strip()
    assert person.exit_code() == 0


def test_every_command_works_in_one_conversation(terminal, deployment, tmp_path):
    saved, state = tmp_path / "talk.json", tmp_path / "state"
    deployment.environ["XDG_STATE_HOME"] = str(state)
    person = terminal("out=mocker")
    person.await_text("> ")
    for line, expected in (
        ("/help", "/load FILE"),
        ("/set max_tokens 5", ""),
        ("/set", "max_tokens 5"),
        ("/set nonsense 5", "nonsense"),
        ("/set temperature 99", "temperature: expected"),
        ("/system be brief", ""),
        ("/system", "be brief"),
        ('"""\nhello\nyou\n"""', "tokens/s, first after"),
        ("two \\\nlines", "tokens/s, first after"),
        (f"/save {saved}", "5 messages in"),
        ("/clear", ""),
        (f"/load {saved}", "5 messages from"),
        ("/load", "/load: expected the name of a file"),
        (f"/load {tmp_path}/absent", "No such file"),
        ("/model", MODEL),
        ("/model /no/such/model", "no such directory"),
        ("/nope", "expected one of /help, /clear, /system, /set, /model, /save, /load, /exit"),
        ("/set max_tokens", ""),
        ("/set", "no option is set"),
    ):
        person.type(line + "\n")
        if expected:
            person.await_text(expected)
        person.await_text("\r\n> ")
    person.type("a long story\n")
    person.await_text("the")  # the answer runs, and without max_tokens does not end soon
    person.type("\x03")
    person.await_text("(stopped)")
    person.await_text("> ")
    person.type("\x1b[A\n")  # the arrow brings the question back
    person.await_text("a long story")
    person.await_text("the")
    person.type("\x03")
    person.await_text("(stopped)")
    person.type("/exit\n")

    assert person.exit_code() == 0
    conversation = json.loads(saved.read_text())
    texts = [message["content"] for message in conversation["messages"]]
    assert [texts[0], texts[1], texts[3]] == ["be brief", "hello\nyou", "two \nlines"]
    assert conversation["options"] == {"max_tokens": 5}
    assert "a long story" in (state / "dynamo" / "history").read_text().splitlines()


def test_batch_does_not_destroy_its_own_file(deployment, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"text": "a"}\n')
    refused = run(deployment, f"in=batch:{questions}", "out=mocker", "--output", questions)

    assert refused.returncode == 2
    assert "another file" in refused.stderr
    assert questions.read_text() == '{"text": "a"}\n'


def test_batch_is_answered_line_by_line(deployment, tmp_path):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text(
        '{"text": "a", "max_tokens": 3}\n{"messages": [], "custom_id": 7}\n{"text": "b"}\n'
    )
    done = run(
        deployment, f"in=batch:{questions}", "out=mocker", "--max-tokens", "5", "--output", answers
    )
    rows = [json.loads(row) for row in answers.read_text().splitlines()]

    assert done.returncode == 1, done.stderr  # a line has failed
    assert [row.get("tokens_out") for row in rows] == [3, None, 5]
    assert "messages" in rows[1]["error"]
    assert rows[1]["custom_id"] == 7
    assert "tokens/s" in done.stdout


def test_api_is_served_in_one_process(deployment):
    port = ports.reserve()
    process = deployment.run("dynamo.cli", "run", "in=http", "out=mocker", "--http-port", str(port))
    eventually(lambda: "listening" in process.log.read_text(), what="listening")
    url = f"http://127.0.0.1:{port}"
    eventually(
        lambda: MODEL in httpx.get(f"{url}/v1/models", timeout=PATIENT_S).text, what="a model"
    )
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=chat("hello", max_tokens=4), timeout=PATIENT_S
    )
    process.signal(signal.SIGINT)

    assert answer.status_code == 200
    assert process.exit_code() == 0


def test_remote_workers_are_used(deployment):
    deployment.mocker("--endpoint", "dyn://a.b.generate", "--speedup-ratio", "100")
    arguments = ("in=stdin", "out=dyn://a.b.generate", "--max-tokens", "5")
    eventually(
        lambda: run(deployment, *arguments, text="hello").returncode == 0,
        what="an answer",
    )


def test_worker_at_an_endpoint_echoes_and_is_found(deployment):
    worker = deployment.run("dynamo.cli", "run", "in=dyn://a.b.generate", "out=echo_core")
    eventually(
        lambda: (
            "a yellow bird" in run(deployment, "in=stdin", "out=auto", text="a yellow bird").stdout
        ),
        what="the prompt",
    )
    absent = run(deployment, "in=stdin", "out=auto", "another", text="hello")
    worker.signal(signal.SIGINT)

    assert worker.exit_code() == 0
    assert "--endpoint dyn://a.b.generate --echo" in worker.log.read_text()
    assert f"no worker serves another ({MODEL} is served)" in absent.stderr


def test_model_that_was_asked_for_answers_though_another_one_shares_its_endpoint(deployment):
    workers = [
        deployment.mocker("--model-name", name, *flags)
        for name, *flags in (("first",), ("parrot", "--echo"), ("third",))
    ]
    ask = lambda: run(deployment, "in=stdin", "out=auto", "parrot", text="a bird")  # noqa: E731
    eventually(
        lambda: all("serving" in each.log.read_text() for each in workers), what="three workers"
    )

    assert all("a bird" in ask().stdout for _ in range(3))


def test_last_message_alone_is_echoed(deployment):
    deployment.environ["DYN_TOKEN_ECHO_DELAY_MS"] = "0"
    answer = run(deployment, "in=stdin", "out=echo_full", text="a yellow bird")

    assert answer.stdout == "a yellow bird\n", answer.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (("out=dyn://a.b.c",), 1, "python -m dynamo.native --endpoint dyn://a.b.c"),
        (("out=dyn://a",), 2, "dyn://namespace.component.endpoint"),
        (("out=warp",), 2, "native, mocker"),
        (("out=dyn://a.b.c", "--prefill", "1"), 2, "--prefill, --decode and --context-length are"),
        (("in=telepathy",), 2, "text, stdin, batch:FILE, http"),
        (("in=batch:none.jsonl", "out=mocker"), 2, "none.jsonl"),
        (("in=stdin", "/no/such/model"), 2, "no such directory"),
    ],
)
def test_wrong_setting_is_one_sentence_at_once(deployment, arguments, exit_code, expected):
    answer = run(deployment, *arguments)

    assert answer.returncode == exit_code
    assert expected in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_prefill_and_decode_are_split_in_one_process(deployment):
    deployment.environ["DYN_LOG"] = "debug"
    arguments = ("in=stdin", "--prefill", "1", "--decode", "2", "--max-tokens", "5")
    answer = run(deployment, *arguments, text="once upon a time " * 350)

    assert answer.returncode == 0, answer.stderr
    assert "Prefilling remotely" in answer.stderr
    assert re.search(r"num_external_tokens=0, .*'do_remote_prefill': False", answer.stderr)
    assert "by local" in answer.stderr
