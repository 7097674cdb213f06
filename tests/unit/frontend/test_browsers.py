"""No foreign web page can drive the server; pages of allowed origins and clients without a browser can."""

import types

import pytest

from dynamo.base import errors
from dynamo.frontend import config
from dynamo.frontend.admission import authentication
from dynamo.frontend.apis import error_dialects
from dynamo.runtime.http import browsers, exchange

OWN = "http://localhost:8000"
FOREIGN = "https://evil.example"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def request(method="POST", body=b"{}", **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return exchange.Request(
        method=method,
        path="/v1/chat/completions",
        query="",
        headers={"host": "localhost:8000", "content-type": "application/json"} | names,
        body=body,
        peer="127.0.0.1:5000",
    )


def policy(*origins, hosts=("box",)):
    return browsers.BrowserPolicy(frozenset(origins), None if hosts is None else frozenset(hosts))


ACCEPTED = {
    "curl with its default type": request(content_type="application/x-www-form-urlencoded"),
    "a client that names a Service": request(host="frontend.dynamo.svc:8000"),
    "Node, which names a Service": request(
        "GET", b"", host="frontend:8000", accept_language="*", sec_fetch_mode="cors"
    ),
    "Node, which names a Service and sends a body": request(
        host="frontend:8000", accept_language="*", sec_fetch_mode="cors"
    ),
    "a page of ours that reads by plain HTTP": request("GET", b"", accept_language="en"),
    "a page of ours": request(origin=OWN, sec_fetch_site="same-origin"),
    "a page of ours behind TLS": request(origin="https://box", host="box"),
    "a page of ours at an address": request(origin="http://[fd77::1]:80", host="[fd77::1]:80"),
    "a typed address": request("GET", b"", sec_fetch_site="none", sec_fetch_mode="navigate"),
    "a link on another site": request(
        "GET",
        b"",
        sec_fetch_site="cross-site",
        sec_fetch_mode="navigate",
        sec_fetch_dest="document",
    ),
}
REFUSED = {
    "a foreign page": request(origin=FOREIGN),
    "a page of another port": request(origin="http://localhost:3000"),
    "a sandboxed frame or a file": request(origin="null"),
    "an image of a foreign page": request("GET", b"", sec_fetch_site="cross-site"),
    "a frame of a foreign page": request(
        "GET", b"", sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="iframe"
    ),
    "a form of a foreign page": request(
        origin=FOREIGN, sec_fetch_mode="navigate", sec_fetch_dest="document"
    ),
    "a name that was rebound": request(
        origin="http://evil.example:8000", host="evil.example:8000", sec_fetch_site="same-origin"
    ),
    "a name that was rebound, to read by plain HTTP": request(
        "GET", b"", host="evil.example:8000", accept_language="*"
    ),
    "text of a page of ours": request(origin=OWN, content_type="text/plain"),
    "a form of a page of ours": request(
        origin=OWN, content_type="multipart/form-data; boundary=application/json"
    ),
}


@pytest.mark.parametrize("who", ACCEPTED)
def test_request_passes(who):
    policy().check(ACCEPTED[who])


@pytest.mark.parametrize("who", REFUSED)
def test_request_of_a_browser_is_refused(who):
    with pytest.raises(errors.Forbidden, match="expected"):
        policy().check(REFUSED[who])


def test_page_of_an_allowed_origin_passes():
    policy(FOREIGN).check(request(origin=FOREIGN, sec_fetch_site="cross-site"))


def test_page_of_an_allowed_origin_may_read_the_answer():
    headers = dict(policy(FOREIGN).cors_headers(request(origin=FOREIGN)))

    assert headers["access-control-allow-origin"] == FOREIGN
    assert {"x-request-id", "request-id"} <= {*headers["access-control-expose-headers"].split(", ")}
    assert headers["vary"] == "origin"


def test_no_other_page_may_read_the_answer():
    assert not policy(FOREIGN).cors_headers(request(origin=OWN))


def test_host_is_not_looked_at_with_api_keys():
    policy(hosts=None).check(request(origin="http://api.example", host="api.example"))


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://", "ftp://a"])
def test_malformed_origin_is_refused(origin):
    with pytest.raises(errors.ConfigError, match="--cors-allow-origin"):
        config.FrontendConfig(cors_allow_origin=(origin,)).check()


def test_every_origin_is_refused_beside_api_keys():
    with pytest.raises(errors.ConfigError, match="exact origins"):
        config.FrontendConfig(cors_allow_origin=("*",), api_keys_file="keys.toml").check()


async def test_foreign_page_gets_an_error_in_the_shape_of_the_api(rig):
    answer = await rig.client.post("/v1/chat/completions", json=CHAT, headers={"origin": FOREIGN})

    assert answer.status_code == 403
    assert "--cors-allow-origin" in answer.json()["error"]["message"]


async def test_page_that_has_its_name_mean_our_address_reads_nothing(rig):
    answer = await rig.client.get(
        "/v1/models", headers={"host": "evil.example:8000", "accept-language": "en"}
    )

    assert answer.status_code == 403
    assert "--allowed-hosts" in answer.json()["error"]["message"]


async def test_options_names_the_methods_of_a_path(rig):
    answer = await rig.client.options("/v1/chat/completions")

    assert (answer.status_code, answer.headers["allow"]) == (204, "OPTIONS, POST")


async def test_preflight_request_of_an_allowed_origin_needs_no_key(bare, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "sk-ann-12345"\n')
    await bare.start(cors_allow_origin=(FOREIGN,), api_keys_file=str(keys))
    asked = {
        "origin": FOREIGN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    answer = await bare.client.options("/v1/chat/completions", headers=asked)

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == FOREIGN
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"


async def test_preflight_request_cannot_bring_a_body(bare, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "sk-ann-12345"\n')
    await bare.start(cors_allow_origin=(FOREIGN,), api_keys_file=str(keys))
    asked = {"origin": FOREIGN, "access-control-request-method": "POST"}
    answer = await bare.client.request(
        "OPTIONS", "/v1/chat/completions", headers=asked, content=b"x" * 100_000
    )

    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{}", "application/json", 401),
        (b"x" * (8 * 2**20 + 1), "application/json", 413),
        (b"{}", "text/plain", 403),
    ],
)
async def test_page_of_an_allowed_origin_may_read_a_refusal(
    bare, tmp_path, body, content_type, status
):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "sk-ann-12345"\n')
    await bare.start(cors_allow_origin=(FOREIGN,), api_keys_file=str(keys))
    headers = {"origin": FOREIGN, "content-type": content_type}
    if status != 401:
        headers["authorization"] = "Bearer sk-ann-12345"
    answer = await bare.client.post("/v1/chat/completions", content=body, headers=headers)

    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == FOREIGN


async def test_stream_for_an_allowed_origin_can_be_read(bare):
    await bare.start(cors_allow_origin=(FOREIGN,))
    await bare.worker()
    answer = await bare.client.post(
        "/v1/chat/completions", json=CHAT | {"stream": True}, headers={"origin": FOREIGN}
    )

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == FOREIGN


def administration(peer):
    """A request to clear the caches, answered by a server without API keys."""
    asked = exchange.Request(
        method="POST", path="/clear_kv_blocks", query="", headers={}, body=b"", peer=peer
    )
    written = []
    wire = types.SimpleNamespace(write=written.append)
    client = exchange.Exchange(asked, wire, lambda: None)
    handler = authentication.LocalAdministration(
        lambda accepted: accepted.respond(200, b"{}"), lambda _: error_dialects.OPENAI
    )
    handler(client)
    return written[0].split()[1]


def test_other_machines_cannot_administer_a_server_without_keys():
    assert administration("192.0.2.7:4000") == b"403"
    assert administration("127.0.0.1:4000") == b"200"
    assert administration("::1:4000") == b"200"
