"""The gRPC server of external processing: checks of its health, and TLS."""

import subprocess

import grpc
import grpc.aio
import pytest

import members
from dynamo.base import errors
from dynamo.gateway import endpoint_picker, server


@pytest.fixture
async def listening():
    made = server.ExtProcServer(lambda: None, 1000)
    yield made
    await made.stop(0)


def renew(directory):
    names = ["-keyout", "tls.key", "-out", "tls.crt", "-subj", "/CN=picker"]
    extension = ["-addext", "subjectAltName=DNS:picker"]
    command = ["openssl", "req", "-x509", *members.KEY, *names, *extension]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture
def certificates(tmp_path):
    return renew(tmp_path)


async def check_health(channel):
    async with channel:
        # the question has the name of a service, which may be any
        return await channel.unary_unary(f"/{server.HEALTH}/Check")(b"", wait_for_ready=True)


async def test_health_is_told_to_who_asks_by_the_protocol_of_grpc(listening):
    port = await listening.start("127.0.0.1", 0)

    assert await check_health(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) == b"\x08\x01"


async def test_server_speaks_tls_with_the_certificates_of_a_directory_and_follows_them(
    listening, certificates
):
    directory = str(certificates)
    port = await listening.start(
        "127.0.0.1", 0, lambda: server.read_certificates(is_secure=True, directory=directory)
    )

    for _ in range(2):
        credentials = grpc.ssl_channel_credentials((certificates / "tls.crt").read_bytes())
        options = [("grpc.ssl_target_name_override", "picker")]
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        assert await check_health(channel) == b"\x08\x01"
        renew(certificates)  # by another key


@pytest.mark.parametrize(
    ("directory", "reason"),
    [(None, "expected --cert-path"), ("/none", "expected tls.crt and tls.key in it")],
)
async def test_picker_names_the_certificates_that_it_lacks(directory, reason):
    settings = endpoint_picker.EndpointPickerConfig(secure=True, cert_path=directory)

    with pytest.raises(errors.ConfigError, match=reason):
        await endpoint_picker.serve(settings)
