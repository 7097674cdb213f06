"""Each command line in the documents has flags that its command takes, as the reference lists them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[3]
FOLDERS = ("docs", "examples", "news", "src", "training")
DOCUMENTS = [
    path
    for path in [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
    ]
    if path.name not in ("CHANGELOG.md", "reference.md") and "decisions" not in path.parts
]
COMMAND = re.compile(
    r"(?:\bdynamo (?P<word>[a-z]+)|-m dynamo\.(?P<module>[\w.]+)(?: (?P<action>[a-z]+)\b)?)(?P<rest>[^`\n#&|;]*)"
)
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*(?!\.)\b")
FOR_ALL = {"--help", "-h", "--config"}
TAKES_MORE = {"python -m dynamo.vllm", "python -m dynamo.sglang"}  # all flags of their engines


def flags_by_command():
    """Return the flags in each section of the reference, with `--no-…` of those that are switches."""
    found = {}
    for title, body in re.findall(
        r"^## `([^`\n]+)`\n(.*?)(?=^## |\Z)", (ROOT / "docs/reference.md").read_text(), re.M | re.S
    ):
        rows = [line.split(" | ") for line in body.splitlines() if line.startswith("| `")]
        flags = {(flag, row[2]) for row in rows for flag in re.findall(r"`(-[\w-]+)`", row[0])}
        switches = {
            "--no-" + flag[2:] for flag, default in flags if default in ("`True`", "`False`")
        }
        found[title] = {flag for flag, _ in flags} | switches
    return found


FLAGS = flags_by_command()


def commands_in(text):
    """Yield the section of the reference, and the flags, of each command line that has a section."""
    for found in COMMAND.finditer(text.replace("\\\n", " ")):
        rest = re.sub(r"'[^']*'|\"[^\"]*\"", "Q", found["rest"])  # flags of another command
        name = f"dynamo {found['word']}" if found["word"] else f"python -m dynamo.{found['module']}"
        if found["word"] == "serve" and re.search(r"\w:[A-Z]|--join|-f\b", rest):
            name += " module:Class"
        if f"{name} {found['action']}" in FLAGS:
            name += f" {found['action']}"
        if name in FLAGS and name not in TAKES_MORE:
            yield name, set(FLAG.findall(rest))


def test_flags_of_a_command_line_are_read():
    text = "`dynamo serve a.b:C -f x --C.d=1 --dry-run`, `python -m dynamo.simulate plan \\\n --trace X`"

    assert list(commands_in(text)) == [
        ("dynamo serve module:Class", {"-f", "--dry-run"}),
        ("python -m dynamo.simulate plan", {"--trace"}),
    ]


def test_command_lines_have_flags_that_their_commands_take():
    strange = {
        (str(path.relative_to(ROOT)), name, flag)
        for path in DOCUMENTS
        for name, flags in commands_in(path.read_text())
        for flag in flags - FLAGS[name] - FOR_ALL
    }

    assert not strange
