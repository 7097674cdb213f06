"""Tokens and certificates are changed under running streams, without a restart, and refusals say their reason."""

import os
import shutil
import ssl

import httpx
import pytest
from deployment import MODEL

import members
from waiting import PATIENT_S, eventually

OLD, NEW = "the token before the change", "the token after the change"
READ_AGAIN = "read the cluster's credentials again"


def write(path, *lines):
    """Replace a file as a secret of Kubernetes is: it is never half written."""
    beside = path.with_name(path.name + ".new")
    beside.write_text("\n".join(lines) + "\n")
    os.replace(beside, path)


class Rotation:
    """A frontend in mode kv, a prefill worker and a decode worker, and how often each has read its credentials."""

    def __init__(self, deployment, *flags):
        transfer = ("--kv-transfer-backends", "tcp")
        remote = ("--disaggregation-mode", "decode", "--max-local-prefill-length", "10")
        prefill = deployment.mocker("--is-prefill-worker", *transfer, *flags)
        decode = deployment.mocker(*remote, *transfer, "--tick-ms", "20", *flags)
        self.decode = decode
        self.frontend = deployment.frontend(
            "--router-mode", "kv", "--max-local-prefill-length", "10", *flags
        )
        self.processes = [self.frontend, prefill, decode]
        self.frontend.others = [prefill, decode]
        self.frontend.await_models([MODEL])
        eventually(lambda: " is connected" in decode.log.read_text(), what="a prefill worker")
        self._times = 0

    def await_reading(self):
        self._times += 1
        for process in self.processes:
            eventually(
                lambda process=process: process.log.read_text().count(READ_AGAIN) >= self._times,
                what=f"new credentials in {process.log}",
            )

    def remote_prefills(self):
        return self.frontend.metric(
            f'dynamo_frontend_routed_prefills_total{{model="{MODEL}",where="remote"}}'
        )


def join_and_answer(deployment, rotation, *flags):
    """A worker that knows only the new credentials is asked, and its events are heard."""
    newcomer = deployment.mocker(*flags)
    rotation.frontend.others.append(newcomer)

    def is_asked():  # the second of two requests goes to the worker that does not answer the first
        with rotation.frontend.stream(max_tokens=100, ignore_eos=True) as stream:
            next(stream)
            rotation.frontend.chat("Tell me a story", max_tokens=2)
        return newcomer.num_requests()

    # not so often that the questions take the processor from the worker that starts
    eventually(is_asked, what="an answer of the worker with new credentials only", every_s=0.5)
    return newcomer


def test_token_is_changed_under_a_running_stream(deployment, tmp_path):
    token = tmp_path / "token"
    write(token, OLD)
    flags = ("--cluster-token-file", str(token))
    rotation = Rotation(deployment, *flags)
    frontend = rotation.frontend
    with frontend.stream(max_tokens=600, ignore_eos=True) as stream:
        next(stream)
        answers = []
        for lines in ((OLD, NEW), (NEW, OLD), (NEW,)):
            write(token, *lines)
            rotation.await_reading()
            answers += [frontend.chat("Tell me a story " * 40, max_tokens=4) for _ in range(3)]
        newcomer = join_and_answer(deployment, rotation, *flags)
        assert [*stream][-1] == "[DONE]"

    assert {answer.status_code for answer in answers} == {200}
    assert rotation.remote_prefills()
    for process in (*rotation.processes, newcomer):
        log = process.log.read_text()
        assert "another cluster token" not in log
        assert OLD not in log
        assert NEW not in log


def test_certificates_and_their_authority_are_changed_under_a_running_stream(deployment, tmp_path):
    members.make_certificates(tmp_path)
    (tmp_path / "token").write_text(members.TOKEN)
    used = tmp_path / "used"
    used.mkdir()
    files = {"member.pem": "cert", "member.key": "key", "authority.pem": "ca-cert"}
    for name in files:
        shutil.copy(tmp_path / name, used / name)
    flags = [
        part
        for name, word in files.items()
        for part in (f"--cluster-tls-{word}-path", str(used / name))
    ]
    flags += ["--cluster-token-file", str(tmp_path / "token")]
    rotation = Rotation(deployment, *flags)
    frontend = rotation.frontend
    both = (tmp_path / "authority.pem").read_text(), (tmp_path / "other.pem").read_text()
    with frontend.stream(max_tokens=600, ignore_eos=True) as stream:
        next(stream)
        answers = []
        write(used / "authority.pem", *both)
        rotation.await_reading()
        for name in ("pem", "key"):
            write(used / f"member.{name}", (tmp_path / f"stranger.{name}").read_text())
        rotation.await_reading()
        answers += [frontend.chat("Tell me a story " * 40, max_tokens=4) for _ in range(3)]
        write(used / "authority.pem", both[1])
        rotation.await_reading()
        answers += [frontend.chat("Tell me a story " * 40, max_tokens=4) for _ in range(3)]
        join_and_answer(deployment, rotation, *flags)
        assert [*stream][-1] == "[DONE]"

    assert {answer.status_code for answer in answers} == {200}
    assert rotation.remote_prefills()


@pytest.mark.parametrize(
    ("fault", "by_frontend", "by_worker"),
    [
        ("expired", "shows a certificate that has expired", "refuses our certificate, which has expired"),
        ("stranger", "an authority that we do not know", "refuses our certificate, whose authority"),
        ("none", "does not speak TLS: give it certificates", "speaks TLS, and we have no certificates"),
    ],
)  # fmt: skip
def test_worker_whose_certificate_is_refused_and_frontend_both_say_why(
    deployment, tmp_path, fault, by_frontend, by_worker
):
    members.make_certificates(tmp_path)
    (tmp_path / "token").write_text(members.TOKEN)
    token = ["--cluster-token-file", str(tmp_path / "token")]

    def flags(name):
        named = members.flags(tmp_path, name)
        return token + [
            part for flag, path in named.items() for part in (f"--{flag.replace('_', '-')}", path)
        ]

    worker = deployment.mocker(*(token if fault == "none" else flags(fault)))
    frontend = deployment.frontend("--worker-wait-secs", "0.5", *flags("member"))
    frontend.others = [worker]
    frontend.await_models([MODEL])
    refused = [frontend.chat("Tell me a story", max_tokens=2) for _ in range(3)]
    for process, text in ((frontend, by_frontend), (worker, by_worker)):
        eventually(lambda process=process, text=text: text in process.log.read_text(), what=text)
    log = frontend.log.read_text()
    lines = [line for line in log.splitlines() if "backends.multiplex" in line]

    assert {answer.status_code for answer in refused} == {503}
    assert not any("127.0.0.1" in answer.text for answer in refused)
    assert "was not reached" not in log
    assert sum(by_frontend in line for line in lines) == 1
    assert worker.log.read_text().count("127.0.0.1 ") >= 1
    if fault == "expired":
        assert "expired at" in worker.log.read_text()
        assert worker.metric('certificate_expiry_seconds{certificate="cluster"}') < 0


def test_certificate_that_expires_within_a_week_is_a_warning_and_a_metric(deployment, tmp_path):
    members.make_certificates(tmp_path)
    named = members.flags(tmp_path)
    flags = [part for flag, path in named.items() for part in (f"--{flag.replace('_', '-')}", path)]
    frontend = deployment.frontend(*flags)
    eventually(frontend.is_live, what="a frontend")
    eventually(lambda: "member.pem) expires at" in frontend.log.read_text(), what="a warning")
    for certificate in ("cluster", "cluster-authority"):
        remaining_s = frontend.metric(
            f'dynamo_frontend_certificate_expiry_seconds{{certificate="{certificate}"}}'
        )
        assert 0 < remaining_s <= 2 * 86_400


def test_certificate_of_the_http_server_is_changed_without_a_restart(deployment, tmp_path):
    members.make_certificates(tmp_path)
    for name in ("pem", "key"):
        shutil.copy(tmp_path / f"authority.{name}", tmp_path / f"http.{name}")
    frontend = deployment.frontend(
        "--tls-cert-path", str(tmp_path / "http.pem"), "--tls-key-path", str(tmp_path / "http.key")
    )
    url = frontend.url.replace("http://", "https://") + "/live"

    def shows(authority):
        tls = ssl.create_default_context(cafile=tmp_path / authority)
        tls.check_hostname = False
        try:
            return httpx.get(url, verify=tls, timeout=PATIENT_S).status_code == 200
        except httpx.TransportError:
            return False

    eventually(lambda: shows("authority.pem"), what="the first certificate")
    for name in ("pem", "key"):
        write(tmp_path / f"http.{name}", (tmp_path / f"other.{name}").read_text())
    eventually(lambda: shows("other.pem"), what="the second certificate")
