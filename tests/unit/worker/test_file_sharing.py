"""What a worker gives away of its model, and what not."""

import contextlib
import hashlib

import pytest

from dynamo.base import clock, errors
from dynamo.protocols import instances, model_card
from dynamo.runtime import component, requests
from dynamo.worker import file_sharing

NAME = instances.EndpointName("a", "b", "generate")
BODY = bytes(range(256)) * 4096  # two parts
DEADLINE_S = 20


class Store:
    """An object store that fails when it is told to."""

    def __init__(self):
        self.bodies, self.error = {}, None

    async def put(self, key, body):
        if self.error is not None:
            raise self.error
        self.bodies[key] = body
        return f"store://{key}"


class Services:
    def __init__(self, store):
        self.store = store

    def object_store(self):
        return self.store

    async def close(self):
        pass


def card_of(path):
    checksum = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
    file = model_card.ModelFile(path=str(path), checksum=checksum, size=len(BODY))
    return model_card.ModelCard(
        display_name="m",
        source_path=str(path.parent),
        context_length=8,
        kv_cache_block_size=4,
        files={"tokenizer.json": file},
    )


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BODY)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return path


@contextlib.asynccontextmanager
async def sharing(path, store=None):
    """The card as it is published, and a way to ask for parts."""
    runtime = await component.DistributedRuntime.in_memory(component.MemoryCluster())
    async with runtime:
        runtime.services = Services(store)
        shared = file_sharing.FileSharing(runtime, clock.SystemClock())
        card = await shared.share(card_of(path), NAME)
        served = await runtime.requests.serve("x", lambda call: None)

        async def ask(name, offset):
            return await requests.ask(
                runtime.requests,
                served,
                model_card.endpoint_of_files(NAME),
                model_card.FilePart(name=name, offset=offset),
                reply_type=bytes,
                timeout_s=DEADLINE_S,
            )

        yield card, ask
        await shared.close()


async def test_a_file_is_given_in_parts_and_ends_with_nothing(path):
    async with sharing(path) as (_, ask):
        first = await ask("tokenizer.json", 0)
        second = await ask("tokenizer.json", len(first))
        end = await ask("tokenizer.json", len(BODY))

    assert len(first) == model_card.PART_BYTES
    assert (first + second, end) == (BODY, b"")


@pytest.mark.parametrize(
    ("name", "offset"), [("model.safetensors", 0), ("../secret", 0), ("tokenizer.json", -1)]
)
async def test_what_the_card_does_not_name_is_not_given(path, name, offset):
    async with sharing(path) as (_, ask):
        with pytest.raises(errors.RemoteProtocolError, match="on the card"):
            await ask(name, offset)


async def test_a_file_that_is_gone_is_unavailable(path):
    async with sharing(path) as (_, ask):
        path.unlink()
        with pytest.raises(errors.Unavailable, match="cannot read its own"):
            await ask("tokenizer.json", 0)


async def test_without_a_store_the_card_stays_as_it_is(path):
    async with sharing(path) as (card, _):
        assert card == card_of(path)


async def test_with_a_store_the_card_says_where_its_files_are(path):
    store = Store()
    async with sharing(path, store) as (card, _):
        file = card.files["tokenizer.json"]

    assert file.url == f"store://{file.checksum.replace(':', '-')}"
    assert store.bodies == {file.checksum.replace(":", "-"): BODY}


async def test_a_store_that_takes_nothing_is_told_and_the_worker_gives_the_file(path, caplog):
    store = Store()
    store.error = errors.Overloaded("it is full")
    async with sharing(path, store) as (card, ask):
        assert card == card_of(path)
        assert await ask("tokenizer.json", 0)
    assert "it is full" in caplog.text
