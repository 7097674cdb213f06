"""Start, drain, stop; certificates."""

import asyncio
import shutil
import ssl
import subprocess

import httpx
import pytest
from frontend_rig import outputs

from dynamo.base import clock as clocks
from dynamo.base import errors, membership
from dynamo.frontend import config, http_certificate, service
from dynamo.observability import metrics
from dynamo.protocols import generate
from dynamo.router import config as router_config
from dynamo.runtime import component, credentials
from dynamo.testing import clock as virtual
from waiting import PATIENT_S, until


async def test_draining_frontend_is_live_unhealthy_and_refuses_requests(rig):
    await rig.frontend.drain()
    health, live = await rig.client.get("/health"), await rig.client.get("/live")
    answer = await rig.chat()

    assert (health.status_code, live.status_code, answer.status_code) == (503, 200, 503)
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


async def test_frontend_says_which_options_its_router_mode_ignores(bare, caplog):
    await bare.start(router_config.RoutingConfig(router_policy="dynamo"))

    assert "--router-policy has no effect in the router mode round-robin" in caplog.text


async def test_frontend_that_leaves_takes_requests_for_its_grace_period(bare, monkeypatch):
    """A load balancer hears of it by /health, and may send it requests until then."""
    await bare.start(grace_period_s=3600.0)
    await bare.worker()
    is_over = asyncio.Event()
    is_asked, real_sleep = asyncio.Event(), clocks.SystemClock.sleep

    async def sleep(_clock, seconds):
        if seconds == 3600.0:
            is_asked.set()
            await is_over.wait()
        else:
            await real_sleep(_clock, seconds)

    monkeypatch.setattr(clocks.SystemClock, "sleep", sleep)
    draining = bare.start_task(bare.frontend.drain())
    await is_asked.wait()
    health, answer = await bare.client.get("/health"), await bare.chat()
    is_over.set()
    await draining
    late = await bare.chat()

    assert (health.status_code, answer.status_code, late.status_code) == (503, 200, 503)


async def test_running_stream_finishes_while_draining(rig):
    rig.one.script = lambda call, _: call.send(generate.Output((104,)))
    asking = rig.start_task(rig.chat(stream=True))
    await rig.until(lambda: rig.one.calls)
    draining = rig.start_task(rig.frontend.drain())
    await asyncio.sleep(0)
    was_done = draining.done()
    for output in outputs("i"):
        rig.one.calls[0].send(output)
    rig.one.calls[0].finish()
    await draining

    assert not was_done
    assert (await asking).text.endswith("data: [DONE]\n\n")


async def test_unfinished_stream_is_cut_off_after_the_drain_timeout(bare, caplog):
    await bare.start(http_graceful_shutdown_timeout_secs=0.01)
    worker = await bare.worker()
    worker.script = lambda call, _: call.send(generate.Output((104,)))
    bare.start_task(bare.chat(stream=True))
    await bare.until(lambda: worker.calls)
    await bare.frontend.drain()

    assert "answers still running" in caplog.text


async def test_frontend_runs_until_stopped_then_drains(rig):
    stop = asyncio.Event()
    running = rig.start_task(rig.frontend.run(stop))
    answer = await rig.chat()
    stop.set()
    await running

    assert answer.status_code == 200
    assert (await rig.client.get("/health")).status_code == 503


async def test_port_in_use_is_a_config_error(rig):
    taken = config.FrontendConfig(
        http_port=rig.frontend.port, discovery_backend="mem", request_plane="memory", event_plane="memory"
    )  # fmt: skip
    async with await component.DistributedRuntime.open(
        taken, rig.cluster, item_type=generate.Output
    ) as runtime:
        with pytest.raises(errors.ConfigError, match="choose --http-port"):
            await service.Frontend(taken, runtime).__aenter__()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_cert_path": "x"}, "both or neither"),
        ({"tls_cert_path": "/none", "tls_key_path": "/none"}, "PEM"),
        ({"tls_client_ca_cert_path": "/none"}, "add --tls-cert-path"),
    ],
)
async def test_contradictory_settings_are_refused(bare, settings, words):
    with pytest.raises(errors.ConfigError, match=words):
        await bare.start(**settings)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server and a client that it knows, and one that it does not."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def make(name, *flags):
        paths = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        subprocess.run(
            ["openssl", "req", "-x509", *new_key, *paths, *flags],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip

    make("authority")
    signed = ["-CA", "authority.pem", "-CAkey", "authority.key"]
    make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    make("client", *signed)
    make("stranger")
    return folder


async def live(rig, certificates, name):
    """Ask with the certificate of this name."""
    trust = ssl.create_default_context(cafile=str(certificates / "authority.pem"))
    if name is not None:
        trust.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    async with httpx.AsyncClient(verify=trust, timeout=PATIENT_S) as client:
        return await client.get(rig.frontend.url + "/live")


def with_certificates(folder, authority="authority.pem"):
    return {
        "tls_cert_path": str(folder / "server.pem"),
        "tls_key_path": str(folder / "server.key"),
        "tls_client_ca_cert_path": str(folder / authority),
    }


async def test_only_clients_with_a_signed_certificate_may_connect(bare, certificates):
    await bare.start(**with_certificates(certificates))
    answer = await live(bare, certificates, "client")

    assert answer.status_code == 200
    for name in ("stranger", None):
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            await live(bare, certificates, name)


async def test_unreadable_certificate_authority_is_a_config_error(bare, certificates):
    with pytest.raises(errors.ConfigError, match="--tls-client-ca-cert-path"):
        await bare.start(**with_certificates(certificates, "missing.pem"))


async def test_certificate_that_changes_before_it_is_watched_is_read_again(
    certificates, tmp_path, caplog
):
    """As while the process waits for etcd at its start."""
    caplog.set_level("INFO")
    used = [shutil.copy(certificates / f"server.{kind}", tmp_path) for kind in ("pem", "key")]
    settings = config.FrontendConfig(tls_cert_path=used[0], tls_key_path=used[1])
    expiries = credentials.ExpiryMetric(metrics.Registry("test"))
    certificate = http_certificate.HttpCertificate(settings, expiries)
    for path in used:
        shutil.copy(certificates / f"client.{path[-3:]}", path)
    time = virtual.VirtualClock()
    following = asyncio.create_task(certificate.follow(time))
    await time.advance(2 * membership.CHECK_S)
    following.cancel()

    assert "read the certificate of the HTTP server again" in caplog.text


async def test_certificate_stays_while_the_next_one_does_not_fit_its_key(
    bare, certificates, tmp_path, caplog
):
    """As between the copies of the two, or after the copy of a wrong one."""
    used = [shutil.copy(certificates / f"server.{kind}", tmp_path) for kind in ("pem", "key")]
    await bare.start(tls_cert_path=used[0], tls_key_path=used[1])
    before = await live(bare, certificates, None)
    shutil.copy(certificates / "client.pem", used[0])
    await until(lambda: "so the former stays" in caplog.text)
    after = await live(bare, certificates, None)

    assert (before.status_code, after.status_code) == (200, 200)
