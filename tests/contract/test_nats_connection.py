"""A process and a real NATS server: being let in, being refused, and being told what to do."""

import asyncio
import gc
import subprocess
import sys

import nkeys
import pytest
from nats.aio import transport

import nats_server as servers
from dynamo.base import errors
from dynamo.protocols import generate, instances
from dynamo.runtime import component, requests
from dynamo.runtime.backends.nats import access, connection
from waiting import PATIENT_S, until

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()


async def join(url, environ=None, start_timeout_s=PATIENT_S):
    whereto = access.read((url,), environ or {})
    return await connection.NatsConnection.open(whereto, name="t", start_timeout_s=start_timeout_s)


async def is_heard(to_nats):
    """Whether we hear what we say."""
    heard = asyncio.get_running_loop().create_future()
    subscription = await to_nats.subscribe("a.*", lambda *what: heard.set_result(what))
    to_nats.publish("a.b", b"data", "reply")
    async with asyncio.timeout(PATIENT_S):
        what = await heard
    await subscription.close()
    await subscription.close()
    return what == ("a.b", "reply", b"data")


def start(tmp_path, *flags):
    server = servers.NatsServer(tmp_path / "nats", *flags)
    server.start()
    return server


def public_key():
    return nkeys.from_seed(bytearray(SEED.encode())).public_key.decode()


def secured(tmp_path, kind):
    """A server that wants to know who comes, and what tells it."""
    if kind == "password":
        environ = {"NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "right"}
        return start(tmp_path, "--user", "u", "--pass", "right"), environ
    if kind == "token":
        return start(tmp_path, "--auth", "right"), {"NATS_AUTH_TOKEN": "right"}
    config = tmp_path / "config"
    config.write_text(f"authorization {{ users = [ {{ nkey: {public_key()} }} ] }}")
    return start(tmp_path, "-c", str(config)), {"NATS_AUTH_NKEY": SEED}


@pytest.mark.parametrize("kind", ["password", "token", "nkey"])
async def test_credentials_are_required_and_their_absence_is_named(tmp_path, kind):
    server, environ = secured(tmp_path, kind)
    to_nats = await join(server.url, environ)
    with pytest.raises(errors.ConfigError, match=r"does not let us in.*NATS_AUTH_TOKEN"):
        await join(server.url)

    assert await is_heard(to_nats)
    await to_nats.close()
    server.stop()


def secured_by_tls(tmp_path):
    """A server, its URL, and the certificate that it is to be trusted by."""
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 1 -subj /CN=t"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    server = start(tmp_path, "--tls", "--tlscert", certificate, "--tlskey", key)
    return server, server.url.replace("nats://", "tls://"), certificate


async def test_tls_connects_and_refuses_an_unknown_authority(tmp_path):
    server, url, certificate = secured_by_tls(tmp_path)
    to_nats = await join(url, {"NATS_TLS_CA_CERT_PATH": certificate})
    with pytest.raises(errors.ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
        await join(url, start_timeout_s=1)

    assert await is_heard(to_nats)
    await to_nats.close()
    server.stop()


async def test_cancelled_connect_leaves_nothing_open(tmp_path):
    server, url, _ = secured_by_tls(tmp_path)
    before = asyncio.all_tasks()
    for hundredths in range(1, 9):  # in the midst of an attempt, or between two
        with pytest.raises(errors.ConfigError):
            await join(url, start_timeout_s=hundredths / 100)
    gc.collect()  # what was left open would warn, and a warning is an error

    assert asyncio.all_tasks() == before
    server.stop()


async def test_absent_server_is_one_sentence_with_its_address(tmp_path, caplog):
    server = servers.NatsServer(tmp_path)
    with pytest.raises(errors.ConfigError) as info:
        await join(server.url, start_timeout_s=0.5)

    assert server.url.removeprefix("nats://") in str(info.value)
    assert "DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq" in str(info.value)
    assert len(caplog.records) == 1


async def test_server_that_starts_late_is_found(tmp_path):
    server = servers.NatsServer(tmp_path)
    joining = asyncio.ensure_future(join(server.url, start_timeout_s=PATIENT_S))
    await asyncio.sleep(0.1)
    server.start()
    to_nats = await joining

    assert await is_heard(to_nats)
    await to_nats.close()
    server.stop()


async def test_refused_subscription_is_unavailable(nats_server):
    to_nats = await join(nats_server.url)
    with pytest.raises(errors.Unavailable, match="'a b'"):
        await to_nats.subscribe("a b", lambda *what: None)
    await to_nats.close()


async def test_message_before_close_is_delivered(nats_server):
    to_nats, other = await join(nats_server.url), await join(nats_server.url)
    heard = []
    await other.subscribe("last.words", lambda subject, reply, data: heard.append(data))
    for _ in range(100):
        to_nats.publish("last.words", b"x" * 10_000)
    await to_nats.close()
    to_nats.publish("last.words", b"too late")
    await until(lambda: len(heard) >= 100)

    assert set(heard) == {b"x" * 10_000}
    await other.close()


async def test_workers_of_one_process_have_separate_subjects(nats_server):
    settings = component.RuntimeConfig(
        discovery_backend="mem",
        request_plane="nats",
        event_plane="nats",
        nats_server=(nats_server.url,),
    )
    name, cluster = instances.EndpointName("a", "b", "c"), component.MemoryCluster()
    async with (
        await component.DistributedRuntime.open(
            settings, cluster, item_type=generate.Output
        ) as asker,
        await component.DistributedRuntime.open(
            settings, cluster, item_type=generate.Output
        ) as first,
        first.sibling() as second,
    ):
        replies = {}
        for number, worker in enumerate((first, second)):
            served = await worker.register(name, lambda call, number=number: call.reply(number))
            replies[number] = await requests.call(
                asker.requests,
                served.transport["nats"],
                name.path,
                None,
                reply_type=int,
                timeout_s=PATIENT_S,
            )

    assert replies == {0: 0, 1: 1}


def test_missing_extra_is_named():
    story = (
        "import sys; sys.modules['nats'] = None\n"
        "from dynamo.base import distribution\n"
        "distribution.load_extra('dynamo.runtime.backends.nats.connection', feature='NATS', extra='nats')"
    )
    done = subprocess.run([sys.executable, "-c", story], capture_output=True, text=True)

    assert "ConfigError: NATS needs nats" in done.stderr
    assert "make setup EXTRAS=nats" in done.stderr


async def test_close_during_an_outage_leaves_nothing_behind(tmp_path, monkeypatch):
    """Not even if nats-py's attempt to connect again fails in the moment in which it is cancelled."""
    server = start(tmp_path)
    joined = await join(server.url)
    tries = asyncio.Event()
    swallowed = []

    async def connect(*where, **options):
        tries.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if swallowed:
                raise
            swallowed.append(True)
            raise ConnectionRefusedError from None

    monkeypatch.setattr(transport.TcpTransport, "connect", connect)
    server.stop()
    async with asyncio.timeout(PATIENT_S):
        await tries.wait()

    await joined.close()

    assert swallowed
    assert asyncio.all_tasks() == {asyncio.current_task()}
