"""A conversation in the terminal: questions, commands, and what is shown of answers."""

import json
import readline
import sys

import pytest
from tests.unit.cli.scripted_talks import Loop, Talk

from dynamo.cli import terminal
from dynamo.protocols import model_errors


@pytest.fixture
def scripted_talk():
    return Talk()


@pytest.fixture
def opened(scripted_talk):
    """Models that can be opened, by name."""
    other = Talk("other")
    other.seen = scripted_talk.seen
    return {"other": other}


@pytest.fixture
def say(monkeypatch, scripted_talk, opened):
    def say(*lines):
        typed = iter(lines)

        def read(prompt):
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        terminal.TerminalConversation(Loop(), scripted_talk, {}, opened.get).run()

    return say


def test_answers_stay_in_the_conversation(say, scripted_talk):
    say("one", "two")

    assert scripted_talk.seen == [["one"], ["one", "answer 1", "two"]]


def test_thoughts_stay_in_the_conversation_beside_the_answer(say, scripted_talk, capsys):
    scripted_talk.thoughts = "hm"
    say("one", "two")

    assert scripted_talk.messages[1] == {
        "role": "assistant",
        "content": "answer 1",
        "reasoning_content": "hm",
    }
    assert "hm" not in capsys.readouterr().out  # which is no terminal


@pytest.mark.parametrize(("kind", "shown"), [("xterm", "\x1b[2mhm\x1b[0m\n\n"), ("dumb", "hm\n\n")])
def test_terminal_shows_thoughts_before_the_answer(monkeypatch, capsys, kind, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", kind)
    monkeypatch.delenv("NO_COLOR", raising=False)
    view = terminal.AnswerView()
    view.show_thought("h\x1bm")
    view.show("yes ")
    view.end()

    assert shown + "yes" in capsys.readouterr().out


def test_lines_about_the_conversation_break_between_words_on_a_terminal(say, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "36")
    say("/frobnicate", "/help")
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= 36
    assert "(/frobnicate: expected one of /help," in lines
    assert "conversation to a file" in lines


def test_system_message_of_a_file_sends_no_codes_to_the_terminal(say, capsys, tmp_path):
    file = tmp_path / "talk.json"
    message = {"role": "system", "content": "brief\x1b]0;title\x07"}
    file.write_text(json.dumps({"model": "m", "messages": [message]}))
    say(f"/load {file}", "/system")

    assert "brief]0;title\n" in capsys.readouterr().out


def test_clear_begins_anew(say, scripted_talk):
    say("one", "/clear", "two")

    assert scripted_talk.seen == [["one"], ["two"]]


def test_exit_leaves(say, scripted_talk):
    say("/exit", "one")

    assert scripted_talk.seen == []


def test_ctrl_c_at_the_prompt_prints_how_to_leave(say, scripted_talk, capsys):
    say(KeyboardInterrupt(), "one")

    assert "Ctrl-D leaves" in capsys.readouterr().out.partition("\n")[2]
    assert scripted_talk.seen == [["one"]]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), model_errors.ContextTooLong("too long")])
def test_question_without_an_answer_is_not_in_the_conversation(say, scripted_talk, failure):
    scripted_talk.failure = failure
    say("one", "two")

    assert scripted_talk.seen == [["one"], ["two"]]


@pytest.mark.parametrize("line", ["caf\udce9", UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "bad")])
def test_question_that_is_no_text_is_refused_and_the_next_one_answered(
    say, scripted_talk, capsys, line
):
    say(line, "two")

    assert scripted_talk.seen == [["two"]]
    assert "(expected text in UTF-8: " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_file_of_no_users_home_is_refused(say, scripted_talk, capsys, command):
    say(f"{command} ~nosuch/file", "two")

    assert f"({command} ~nosuch/file: ~nosuch is no user's home)" in capsys.readouterr().out
    assert scripted_talk.seen == [["two"]]


def test_without_standard_input_there_is_no_conversation(say, scripted_talk):
    say(RuntimeError("input(): lost sys.stdin"))

    assert scripted_talk.seen == []


def test_question_of_several_lines_is_one(say, scripted_talk):
    say('"""one', "  two", 'three"""', "a\\", "b", '"""', "x", '"""')

    assert [seen[-1] for seen in scripted_talk.seen] == ["one\n  two\nthree", "a\nb", "x"]


def test_question_in_quotation_marks_may_begin_as_a_command_does(say, scripted_talk):
    say('"""/etc/hosts', 'is what?"""', '"""/exit"""', "/exit", "never")

    assert [seen[-1] for seen in scripted_talk.seen] == ["/etc/hosts\nis what?", "/exit"]


def test_system_message_stands_first_and_stays(say, scripted_talk, capsys):
    say("one", "/system be brief", "two", "/clear", "three", "/system", "/system x", "four")

    assert scripted_talk.seen[1:3] == [
        ["be brief", "one", "answer 1", "two"],
        ["be brief", "three"],
    ]
    assert scripted_talk.seen[3][0] == "x"
    assert "be brief\n" in capsys.readouterr().out


def test_options_are_set_shown_and_unset(say, scripted_talk, capsys):
    say("/set", "/set max_tokens 5", "/set stop END", "one", "/set", "/set stop", "two")

    shown = capsys.readouterr().out
    assert "(no option is set: the model's own hold)" in shown
    assert 'max_tokens 5\nstop "END"\n' in shown
    assert scripted_talk.options == {"max_tokens": 5}


def test_invalid_option_is_refused_and_the_old_one_stays(say, scripted_talk, capsys):
    say("/set temperature 1", "/set temperature 99", "one")

    assert "(temperature: too hot)" in capsys.readouterr().out
    assert scripted_talk.options == {"temperature": 1}


def test_field_that_no_option_may_change_is_refused_and_says_what_to_do(say, scripted_talk, capsys):
    say("/set model other", "/set n 2", "one")

    shown = capsys.readouterr().out
    assert "(/set model: use /model)" in shown
    assert "(/set n: one answer is shown)" in shown
    assert scripted_talk.options == {}


def test_conversation_is_saved_and_loaded(say, scripted_talk, tmp_path, capsys):
    path = tmp_path / "talk.json"
    say("/set seed 3", "one", f"/save {path}", "/clear", "/set seed", f"/load {path}", "two")

    assert scripted_talk.seen[-1] == ["one", "answer 1", "two"]
    assert scripted_talk.options == {"seed": 3}
    assert json.loads(path.read_text())["model"] == "m"


@pytest.mark.parametrize("content", [b"no json", b'{"model": 1}', b'{"model": "\xff"}', None])
def test_file_that_is_no_conversation_is_refused(say, scripted_talk, tmp_path, capsys, content):
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_bytes(content)
    say("one", f"/load {path}", "/load", "two")

    shown = capsys.readouterr().out
    assert f"(/load {path}: " in shown
    assert "Errno" not in shown
    assert scripted_talk.seen[-1] == ["one", "answer 1", "two"]


def test_loaded_conversation_that_no_request_may_have_is_refused(
    say, scripted_talk, tmp_path, capsys
):
    path = tmp_path / "talk.json"
    path.write_text('{"model": "m", "messages": [], "options": {"temperature": 99}}')
    say("one", f"/load {path}", "two")

    assert "(temperature: too hot)" in capsys.readouterr().out
    assert scripted_talk.seen[-1] == ["one", "answer 1", "two"]


def test_another_model_goes_on_with_the_conversation(say, scripted_talk, capsys):
    say("one", "/model", "/model other", "/model", "two")

    assert scripted_talk.seen[-1] == ["one", "answer 1", "two"]
    assert "\nm\nother, with the same conversation\nother\n" in capsys.readouterr().out


def test_model_of_other_processes_stays(scripted_talk, monkeypatch, capsys):
    typed = iter(["/model other", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    terminal.TerminalConversation(Loop(), scripted_talk, {}).run()

    assert "another process" in capsys.readouterr().out


def test_unknown_command_is_named_with_the_known_ones(say, scripted_talk, capsys):
    say("/hepl", "/help")

    shown = capsys.readouterr().out
    assert "(/hepl: expected one of /help, /clear" in shown
    assert "/save FILE" in shown
    assert scripted_talk.seen == []


def test_history_keeps_what_was_typed_in_another_window(say, monkeypatch, tmp_path):
    path, at_exit = tmp_path / "dynamo" / "history", []
    path.parent.mkdir()
    path.write_text("earlier\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    readline.clear_history()

    say("/exit")
    path.write_text("earlier\nof the other window\n")
    readline.add_history("of this window")
    for function, *arguments in at_exit:
        function(*arguments)
    readline.clear_history()

    assert path.read_text().splitlines() == ["earlier", "of the other window", "of this window"]


def test_empty_no_color_is_as_good_as_none(monkeypatch, capsys):
    """As https://no-color.org says."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    view = terminal.AnswerView()
    view.show("**yes** ")
    view.end()

    assert "\x1b[1myes" in capsys.readouterr().out
