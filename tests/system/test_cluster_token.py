"""Processes that share a token, or certificates, serve each other; others are told why they do not."""

import pytest
from deployment import MODEL

import members
from waiting import eventually

STRANGE = "the token of another cluster"


def token_file(folder, name, token):
    path = folder / name
    path.write_text(token + "\n")
    return ("--cluster-token-file", str(path))


def certificate_flags(folder):
    folder.mkdir()
    members.make_certificates(folder)
    named = members.flags(folder)
    return [part for name, path in named.items() for part in ("--" + name.replace("_", "-"), path)]


def is_logged(process, text):
    return lambda: text in process.log.read_text()


@pytest.mark.parametrize("how", ["token", "tls", "both"])
def test_frontend_and_worker_with_one_token_connect(deployment, tmp_path, how):
    flags = []
    if how in ("token", "both"):
        flags += token_file(tmp_path, "token", members.TOKEN)
    if how in ("tls", "both"):
        flags += certificate_flags(tmp_path / "certificates")
    frontend = deployment.frontend("--router-mode", "kv", *flags)
    deployment.mocker(*flags)
    frontend.await_models([MODEL])
    answers = [frontend.chat("Tell me a story " * 40, max_tokens=5) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [5, 5, 5]


def test_worker_with_another_token_is_refused_and_both_log_why(deployment, tmp_path):
    deployment.environ["DYN_CLUSTER_TOKEN"] = members.TOKEN
    frontend = deployment.frontend("--migration-limit", "0", "--worker-wait-secs", "0.5")
    del deployment.environ["DYN_CLUSTER_TOKEN"]
    stranger = deployment.mocker(*token_file(tmp_path, "other", STRANGE))
    frontend.await_models([MODEL])
    refused = frontend.chat("Tell me a story", max_tokens=5)
    sentence = "has another cluster token; give every process the same (--cluster-token-file)"
    for process in (frontend, stranger):
        eventually(is_logged(process, sentence), what=f"{sentence} in {process.log}")
    logs = frontend.log.read_text() + stranger.log.read_text()

    assert refused.status_code == 503
    assert members.TOKEN not in logs
    assert STRANGE not in logs
    assert "Traceback" not in logs


def test_members_serve_while_a_worker_with_another_token_tries(deployment, tmp_path):
    ours = token_file(tmp_path, "token", members.TOKEN)
    frontend = deployment.frontend(*ours)
    deployment.mocker(*token_file(tmp_path, "other", STRANGE))
    frontend.await_models([MODEL])
    honest = deployment.mocker(*ours)
    eventually(
        lambda: frontend.chat("Tell me a story", max_tokens=5).status_code == 200,
        what="an answer of the member",
    )
    answers = [frontend.chat("Tell me a story", max_tokens=5) for _ in range(10)]

    assert {answer.status_code for answer in answers} == {200}
    assert honest.is_running


@pytest.mark.parametrize("engine", ["mocker", "frontend"])
def test_address_off_loopback_without_a_token_is_refused(deployment, engine):
    process = deployment.run(f"dynamo.{engine}", "--tcp-rpc-host", "10.20.30.40")
    process.may_end = True

    assert process.exit_code() != 0
    said = process.log.read_text().strip().splitlines()
    assert len(said) == 1
    assert "--cluster-token-file" in said[0]
    assert "--insecure" in said[0]
