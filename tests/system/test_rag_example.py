"""The example that answers by passages of files, against a frontend with an embedding and a chat worker."""

import pathlib
import re
import subprocess
import sys
import types

from deployment import MODEL

from waiting import PATIENT_S

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "rag" / "rag.py"


def run(frontend, *arguments):
    options = ("--url", frontend.url, "--embed-model", "vectors", "--chat-model", MODEL)
    return subprocess.run(
        [sys.executable, EXAMPLE, *options, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )


def test_question_is_answered_by_the_nearest_passages(deployment, tmp_path):
    flags = ("--task", "embed", "--model-name", "vectors")
    frontend = deployment.frontend()
    frontend.others += [deployment.mocker(*flags), deployment.mocker("--speedup-ratio", "1000")]
    frontend.await_models([MODEL, "vectors"])
    question = "Where do cats sleep?"
    notes = tmp_path / "notes.txt"
    notes.write_text(
        f"Rain falls.\n\n{question}\n\nDogs bark at the moon.\n\nTwo and two are four."
    )

    done = run(frontend, question, str(notes))
    passages = re.findall(r"^\[(-?[\d.]+)\] (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert passages[0] == ("1.000", question)  # the vector of an equal text is the same
    assert len(passages) == 2
    assert len(done.stdout.splitlines()) > len(passages)

    absent = str(tmp_path / "absent.txt")
    assert run(frontend, question, absent).stderr.startswith("rag.py: [Errno 2] No such file")
    failed = run(frontend, "--embed-model", MODEL, question, str(notes))
    assert failed.returncode == 1
    assert "/v1/embeddings: " in failed.stderr
    assert "makes no embeddings" in failed.stderr


def test_frontend_that_does_not_answer_is_named_in_one_line(tmp_path, unused_tcp_port):
    nowhere = types.SimpleNamespace(url=f"http://127.0.0.1:{unused_tcp_port}")
    notes = tmp_path / "notes.txt"
    notes.write_text("Rain falls.")

    (line,) = run(nowhere, "Where?", str(notes)).stderr.splitlines()
    assert line.startswith(f"no frontend answers at {nowhere.url} (")
