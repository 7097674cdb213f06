"""The routes by which LoRA adapters are loaded and unloaded, over a real socket."""

from pathlib import Path

import pytest
import told_worker

from dynamo.base import errors
from dynamo.protocols import model_errors
from dynamo.worker import lora_routes


class Asked(told_worker.Told):
    said, numbers = 3, {"poet": 3}

    async def load(self, name, directory):
        return self.told("load", name, directory)

    async def unload(self, name):
        return self.told("unload", name)


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
async def client(asked):
    async with told_worker.client_of(lora_routes.table(asked)) as client:
        yield client


def body(name="poet", uri="file:///adapters/poet"):
    return {"lora_name": name, "source": {"uri": uri}}


@pytest.mark.parametrize("path", ["/v1/loras", "/loras"])
async def test_an_adapter_is_loaded_shown_and_unloaded(client, asked, path):
    loaded = await client.post(path, json=body())
    shown = await client.get(path)
    unloaded = await client.delete(f"{path}/poet")

    said = {"status": "success", "lora_name": "poet", "lora_id": 3}
    assert loaded.json() == said | {"message": "LoRA adapter 'poet' is loaded"}
    assert shown.json() == {"status": "success", "loras": {"poet": 3}, "count": 1}
    assert unloaded.json() == said | {"message": "LoRA adapter 'poet' is unloaded"}
    assert asked.heard == [("load", "poet", Path("/adapters/poet")), ("unload", "poet")]


@pytest.mark.parametrize("path", ["/v1/loras", "/loras"])
async def test_a_name_may_have_slashes_and_blanks(client, asked, path):
    await client.delete(f"{path}/house/a%20poet/loras/2")

    assert asked.heard == [("unload", "house/a poet/loras/2")]


@pytest.mark.parametrize(
    ("uri", "directory"),
    [
        ("file:///adapters/a%20poet", "/adapters/a poet"),
        ("file://localhost/adapters/poet", "/adapters/poet"),
        ("/adapters/poet", "/adapters/poet"),
        ("/adapters/50%25", "/adapters/50%25"),
    ],
)
def test_where_it_lies(uri, directory):
    assert lora_routes.directory(uri) == Path(directory)


@pytest.mark.parametrize(
    "uri",
    [
        "hf://someone/poet",
        "s3://b/poet",
        "file://elsewhere/poet",
        "adapters/poet",
        "file:poet",
        "file://[bad/x",
        "//[x",
        "//host/poet",
        "file:///a?b",
        "file:///a#b",
        "file://loc\u2100alhost/a",
        "",
    ],
)
def test_what_is_not_on_this_host_is_refused(uri):
    with pytest.raises(errors.InvalidRequest, match="expected file:///directory on this worker"):
        lora_routes.directory(uri)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected"),
        (b'{"lora_name": "", "source": {"uri": "/a"}}', "lora_name: expected"),
        (b'{"lora_name": "poet"}', "source: required, but missing"),
        (b'{"lora_name": "poet", "source": {}}', "source.uri: required, but missing"),
        (b'{"lora_name": "poet", "source": {"uri": "/a"}, "rank": 4}', "`rank`"),
        (b'{"lora_name": "poet", "source": {"uri": "hf://a/b"}}', "source.uri: expected file:///"),
    ],
)
async def test_a_field_that_is_wrong_is_named(client, asked, content, says):
    answer = await client.post("/v1/loras", content=content)

    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert asked.heard == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (model_errors.ModelNotFound("there is no adapter 'poet' here"), 404),
        (errors.Conflict("it is there"), 409),
        (errors.EngineFailed("no memory"), 500),
    ],
)
async def test_what_cannot_be_done_has_its_status(client, asked, failure, status):
    asked.failure = failure

    answers = [await client.post("/v1/loras", json=body()), await client.delete("/v1/loras/poet")]

    assert [one.status_code for one in answers] == [status, status]
    assert answers[0].json() == {"error": {"message": str(failure), "code": status}}
