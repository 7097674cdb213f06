from dataclasses import dataclass
from typing import Literal

import pytest

from dynamo.base import addresses, config, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """A door for tests."""

    model: str | None = config.option(None, help="what to serve", flag="")
    port: int = config.option(
        8000, env="T_PORT", help="port; 0 takes any, 100% free", least=0, most=65535
    )
    wait_s: float = config.option(1.5, help="how long", least=0)
    mode: Literal["direct", "random"] = config.option("random", env="T_MODE", help="how to choose")
    quiet: bool = config.option(False, env="T_QUIET", help="say less")
    names: tuple[str, ...] = config.option((), env="T_NAMES", help="which")
    limit: int | None = config.option(None, help="how many", flag="--max-limit")


def load(*argv, **environ):
    return config.load(DoorConfig, prog="door", argv=argv, environ=environ)


def toml(tmp_path, text):
    path = tmp_path / "door.toml"
    path.write_text(text)
    return "--config", str(path)


def test_unset_options_have_their_defaults():
    assert load() == DoorConfig()


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    file = toml(tmp_path, 'port = 1\nmode = "direct"\nwait_s = 2\n')
    loaded = load(*file, "--port", "3", T_PORT="2", T_MODE="random")

    assert (loaded.port, loaded.mode, loaded.wait_s) == (3, "random", 2.0)


@pytest.mark.parametrize("key", ["max_limit", "limit"])
def test_file_names_an_option_by_its_flag_or_its_field(tmp_path, key):
    assert load(*toml(tmp_path, f"{key} = 7")).limit == 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LampConfig:
    """A lamp for tests."""

    lamp_watts: int = config.setting(40, help="how bright")


def test_setting_has_a_variable_of_its_own_name(capsys):
    loaded = config.load(LampConfig, prog="lamp", argv=(), environ={"DYN_LAMP_WATTS": "60"})
    with pytest.raises(SystemExit):
        config.load(LampConfig, prog="lamp", argv=("--help",))

    assert loaded.lamp_watts == 60
    assert "[DYN_LAMP_WATTS]" in capsys.readouterr().out


def test_every_type_can_be_given_by_flag():
    loaded = load(
        "m", "--wait-s=0.5", "--mode", "direct", "--quiet", "--names", "a, b,", "--max-limit", "7"
    )

    assert loaded == DoorConfig(
        model="m", wait_s=0.5, mode="direct", quiet=True, names=("a", "b"), limit=7
    )


def test_file_may_set_options_of_every_type(tmp_path):
    file = toml(
        tmp_path, 'model = "m"\nport = 1\nwait_s = 2.5\nquiet = true\nnames = ["a"]\nlimit = 4\n'
    )

    assert load(*file) == DoorConfig(
        model="m", port=1, wait_s=2.5, quiet=True, names=("a",), limit=4
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("TRUE", True), ("on", True), ("no", False), ("", False)]
)
def test_truth_in_the_environment_has_several_spellings(text, expected):
    assert load(T_QUIET=text).quiet is expected


@pytest.mark.parametrize("kind", [int, str, bool, addresses.PortRange])
def test_empty_variable_leaves_an_option_without_a_value(tmp_path, kind):
    """Compose files and units of systemd pass `NAME=` on where nothing is set; so does NVIDIA Dynamo take it."""

    @dataclass(frozen=True, kw_only=True)
    class Optional:
        """May have a value."""

        limit: kind | None = config.option(None, env="T_LIMIT", help="limit")  # noqa: RUF009 (a field)

    assert config.load(Optional, prog="p", argv=[], environ={"T_LIMIT": ""}) == Optional()


def test_negated_flag_overrides_the_environment():
    assert load("--no-quiet", T_QUIET="1").quiet is False


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--port", "x"], {}, "--port: expected a whole number, got 'x'"),
        ([], {"T_PORT": "8000.5"}, "T_PORT: expected a whole number, got '8000.5'"),
        (["--wait-s", "long"], {}, "--wait-s: expected a number, got 'long'"),
        (["--port", "-1"], {}, "--port: expected 0 to 65535, got -1"),
        ([], {"T_PORT": "65536"}, "T_PORT: expected 0 to 65535, got 65536"),
        (["--wait-s", "-0.1"], {}, "--wait-s: expected at least 0, got -0.1"),
        (["--wait-s", "nan"], {}, "--wait-s: expected at least 0, got nan"),
        (["--wait-s", "inf"], {}, "--wait-s: expected a finite number, got inf"),
        ([], {"T_MODE": "best"}, "T_MODE: expected one of direct, random, got 'best'"),
        ([], {"T_QUIET": "perhaps"}, "T_QUIET: expected true or false, got 'perhaps'"),
        (["--prot", "1"], {}, "unrecognized argument: --prot (did you mean --port?)"),
        (["--por", "1"], {}, "unrecognized argument: --por (did you mean --port?)"),
        (["--pelican", "1"], {}, "unrecognized argument: --pelican (see --help)"),
        (["--port"], {}, "--port: expected one argument"),
    ],
)
def test_invalid_option_is_refused_in_one_sentence(argv, environ, says):
    with pytest.raises(errors.ConfigError) as refusal:
        load(*argv, **environ)

    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "unknown key 'prot'; expected one of max_limit, mode"),
        ("port = 1.5", "port in {path}: expected a whole number, got 1.5"),
        ("port = true", "port in {path}: expected a whole number, got True"),
        ("port = 70000", "port in {path}: expected 0 to 65535, got 70000"),
        ("wait_s = true", "wait_s in {path}: expected a number, got True"),
        (f'{{"wait_s": 1{"0" * 400}}}', "wait_s in {path}: expected a number, got 1000"),
        ("model = 3", "model in {path}: expected a text, got 3"),
        ("names = [1]", "names in {path}: expected a list of texts, got [1]"),
        ("names = 1", "names in {path}: expected a list of texts, got 1"),
        ("quiet = 1", "quiet in {path}: expected true or false, got 1"),
        ("mode = ['direct']", "mode in {path}: expected one of direct, random"),
        ("port = ", "expected a readable file of TOML or JSON"),
    ],
)
def test_invalid_file_is_refused_in_one_sentence(tmp_path, text, says):
    file = toml(tmp_path, text)
    with pytest.raises(errors.ConfigError) as refusal:
        load(*file)

    assert says.format(path=file[1]) in str(refusal.value)


def test_null_in_a_file_leaves_an_option_without_a_value():
    assert load("--config", '{"limit": null, "port": 1}') == DoorConfig(port=1)
    with pytest.raises(errors.ConfigError, match="port in --config: expected a whole number"):
        load("--config", '{"port": null}')


def test_missing_or_binary_file_is_refused(tmp_path):
    binary = tmp_path / "door.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.toml", binary):
        with pytest.raises(errors.ConfigError, match="expected a readable file of TOML or JSON"):
            load("--config", str(path))


def test_help_shows_each_flag_with_default_and_variable(capsys):
    with pytest.raises(SystemExit) as leaving:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())

    assert leaving.value.code == 0
    assert "--port N port; 0 takes any, 100% free (default: 8000) [T_PORT]" in text
    assert "--mode direct|random how to choose (default: random) [T_MODE]" in text


def test_help_shows_the_default_of_a_list_as_a_flag_takes_it(capsys):
    @dataclass(frozen=True, kw_only=True)
    class BowlConfig:
        """A bowl."""

        fruits: tuple[str, ...] = config.option(("plum", "pear"), help="which")

    with pytest.raises(SystemExit):
        config.load(BowlConfig, prog="bowl", argv=["--help"])

    assert "which (default: plum,pear)" in capsys.readouterr().out


@pytest.mark.parametrize("columns", range(50, 70))
def test_help_breaks_no_flag_at_its_hyphens(capsys, monkeypatch, columns):
    @dataclass(frozen=True, kw_only=True)
    class BowlConfig:
        """A bowl."""

        size: int = config.option(1, help="how much goes in, unless --another-long-flag says so")

    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        config.load(BowlConfig, prog="bowl", argv=["--help"])

    assert "--another-long-flag" in capsys.readouterr().out


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The second part of a command line."""

    num_slots: int = config.option(4, aliases=("--slots",), help="how many")


def test_alias_sets_the_same_option():
    (settings,) = config.load_parts((EngineSettings,), prog="p", argv=["--slots", "7"], environ={})

    assert settings.num_slots == 7


def test_several_parts_share_one_command_line():
    argv = ["--num-slots", "7"]
    first, second = config.load_parts((DoorConfig, EngineSettings), prog="p", argv=argv, environ={})

    assert first == DoorConfig()
    assert second == EngineSettings(num_slots=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideDoorConfig(DoorConfig):
    """A wide door."""

    width: int = config.option(2, help="how wide")


def test_help_groups_the_flags_by_the_class_that_declares_them(capsys):
    with pytest.raises(SystemExit):
        config.load_parts((WideDoorConfig, EngineSettings), prog="p", argv=["--help"], environ={})
    text = capsys.readouterr().out
    order = [
        "this command:",
        "--width",
        "A door for tests:",
        "--port",
        "The second part",
        "--slots",
    ]

    assert [text.index(one) for one in order] == sorted(map(text.index, order))
    assert text.count("--port N") == 1


def test_unknown_flag_without_a_similar_one_has_no_suggestion():
    with pytest.raises(errors.ConfigError, match=r"--foo \(see --help\)"):
        load("--foo")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestConfig:
    """Somebody who brings flags of their own."""

    volume: int = config.option(3, help="how loud")
    rest: tuple[str, ...] = config.rest(help="A guest's own flags are taken as well.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Who takes guests: without a bare argument, which would take a value of theirs."""

    port: int = config.option(8000, help="port")


def load_with_guest(*argv, **environ):
    return config.load_parts((HostConfig, GuestConfig), prog="host", argv=argv, environ=environ)


def test_undeclared_arguments_are_passed_on_in_order():
    host, guest = load_with_guest(
        "--theirs", "1,2", "--port", "3", "-x", '{"a": 1}', "--volume=5", "--also=b", "-1"
    )

    assert (host.port, guest.volume) == (3, 5)
    assert guest.rest == ("--theirs", "1,2", "-x", '{"a": 1}', "--also=b", "-1")


def test_passed_on_arguments_may_be_set_in_the_file(tmp_path):
    _, guest = load_with_guest(*toml(tmp_path, 'rest = ["--theirs", "1,2"]'))

    assert guest.rest == ("--theirs", "1,2")


def test_help_names_the_program_that_gets_undeclared_flags(capsys):
    with pytest.raises(SystemExit):
        load_with_guest("--help")

    said = capsys.readouterr().out
    assert "A guest's own flags are taken as well." in said
    assert "--rest" not in said


@dataclass(frozen=True, kw_only=True)
class WithFlags:
    """Starts something else."""

    name: str = config.option("", help="name")
    flags: str = config.option("", help="flags of something else", takes="text")


def test_flag_that_takes_words_takes_all_up_to_the_next_flag():
    @dataclass(frozen=True, kw_only=True)
    class Several:
        """Several words."""

        names: tuple[str, ...] = config.option((), help="names", takes="words")
        size: int = config.option(0, help="size")

    argv = ["--names", "a", "b", "--size", "3", "--names", "c,d"]

    assert config.load(Several, prog="several", argv=argv) == Several(
        names=("a", "b", "c", "d"), size=3
    )


@pytest.mark.parametrize("argv", [["--flags", "--fast"], ["--flags=--fast"]])
def test_text_that_takes_flags_may_begin_with_a_dash(argv):
    assert config.load(WithFlags, prog="p", argv=argv, environ={}).flags == "--fast"


def test_flags_with_an_open_quote_are_named():
    with pytest.raises(errors.ConfigError, match="--flags: expected flags as in a shell, got"):
        config.load(WithFlags, prog="p", argv=["--flags", '--name "x'], environ={})


def test_missing_text_is_not_taken_from_the_next_flag():
    with pytest.raises(errors.ConfigError, match="--name: expected one argument"):
        config.load(WithFlags, prog="p", argv=["--name", "--flags", "x"], environ={})


@dataclass(frozen=True, kw_only=True)
class WithWords:
    """Takes words."""

    words: tuple[str, ...] = config.option((), flag="", help="words")


def test_positional_arguments_keep_order_and_commas():
    loaded = config.load(WithWords, prog="p", argv=["a,b", "c"], environ={})

    assert loaded.words == ("a,b", "c")


def test_positional_arguments_may_stand_on_both_sides_of_a_flag():
    @dataclass(frozen=True, kw_only=True)
    class Action:
        """Does something with a file."""

        action: str = config.option(flag="", help="what to do")
        file: str = config.option("", flag="", help="file")
        port: int = config.option(0, help="port")
        words: tuple[str, ...] = config.option((), flag="", help="words")

    argv = ["apply", "--port", "1", "f.yaml", "a", "--port", "2", "b"]

    assert config.load(Action, prog="p", argv=argv, environ={}) == Action(
        action="apply", file="f.yaml", port=2, words=("a", "b")
    )


@dataclass(frozen=True, kw_only=True)
class WithRequired:
    """Does something with a file."""

    action: Literal["show", "check"] = config.option("show", flag="", help="what to do")
    path: str = config.option(flag="", env="T_PATH", help="the file to read")


def load_required(*argv, **environ):
    return config.load(WithRequired, prog="p", argv=argv, environ=environ)


def test_help_has_brackets_around_what_may_be_left_out_alone(capsys):
    with pytest.raises(SystemExit):
        load_required("--help")

    assert capsys.readouterr().out.startswith("usage: p [show|check] PATH [flags]\n")


def test_argument_without_a_default_has_to_be_given():
    says = r"expected PATH \(the file to read\); usage: p \[show\|check\] PATH \[flags\]"
    for argv in ((), ("check",), ("check", "")):
        with pytest.raises(errors.ConfigError, match=says):
            load_required(*argv)

    assert load_required("check", "f") == WithRequired(action="check", path="f")
    assert load_required(T_PATH="f") == WithRequired(path="f")


@pytest.mark.parametrize("argv", [["--port", "1", " "], [" ", "--port", "1"], ["--port=1", "\t "]])
def test_argument_of_blanks_is_named(argv):
    with pytest.raises(
        errors.ConfigError, match="only blanks: a comment or a blank after a backslash"
    ):
        config.load(Blanks, prog="x", argv=argv)


def test_value_of_a_flag_may_be_blank_or_empty():
    assert config.load(Blanks, prog="x", argv=["--text", " "]).text == " "
    assert config.load(Blanks, prog="x", argv=["--text", ""]).text == ""


def test_list_in_a_variable_may_be_json():
    loaded = config.load(Blanks, prog="x", argv=[], environ={"X_NAMES": '["generate", "embed"]'})

    assert loaded.names == ("generate", "embed")
    with pytest.raises(errors.ConfigError, match="expected a list of texts"):
        config.load(Blanks, prog="x", argv=[], environ={"X_NAMES": '["generate"'})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blanks:
    """Options for blanks and lists."""

    port: int = config.option(0, help="a number")
    text: str = config.option("", help="a text")
    names: tuple[str, ...] = config.option((), env="X_NAMES", help="some names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Implied:
    """An option that another variable can imply."""

    backend: str = config.option("file", env="BACKEND", implied=("ADDRESS", "etcd"), help="which")


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, "file"),
        ([], {"ADDRESS": ""}, "file"),
        ([], {"ADDRESS": "there"}, "etcd"),
        ([], {"ADDRESS": "there", "BACKEND": "mem"}, "mem"),
        (["--backend", "mem"], {"ADDRESS": "there"}, "mem"),
    ],
)
def test_variable_implies_the_value_of_an_option_that_is_not_set(argv, environ, expected):
    options = config.load(Implied, prog="x", argv=argv, environ=environ)

    assert options.backend == expected
