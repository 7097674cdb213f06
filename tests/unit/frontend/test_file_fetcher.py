"""The sources of a model's files, and that no file with another checksum is used."""

import contextlib
import hashlib
import os
import pathlib

import msgspec
import pytest

from dynamo.base import clock, errors
from dynamo.frontend.model_registry import file_fetcher
from dynamo.preprocess import loading
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component

NAME = instances.EndpointName("a", "b", "generate")
BODY = b"tokenizer" * 100_000  # two parts
ELSEWHERE = "/nonexistent/tokenizer.json"


def card_of(path=ELSEWHERE, body=BODY, **fields):
    checksum = f"sha256:{hashlib.sha256(body).hexdigest()}"
    file = model_card.ModelFile(path=str(path), checksum=checksum, size=len(body))
    return model_card.ModelCard(
        display_name="m",
        source_path="/nonexistent",
        context_length=8,
        kv_cache_block_size=4,
        files={"tokenizer.json": msgspec.structs.replace(file, **fields)},
    )


class Rig:
    """A frontend's fetch, and workers that give bytes away."""

    def __init__(self, runtime, directory):
        self.runtime, self.directory, self.asked = runtime, directory, []
        self.fetch = file_fetcher.FileFetcher(
            runtime.requests, runtime.services, directory, clock.SystemClock()
        )

    async def giver(self, body, name=NAME):
        """A worker that says that these are the file's."""

        def give(call):
            part = msgspec.msgpack.decode(call.body, type=model_card.FilePart)
            self.asked.append((name.component, part.offset))
            call.reply(body[part.offset :][: model_card.PART_BYTES])
            call.finish()

        endpoint = model_card.model_files_path(name)
        address = await self.runtime.requests.serve(endpoint, give)
        return file_fetcher.FileProvider(address, endpoint)

    async def content(self, card, *givers):
        """What a reader of the card then finds."""
        brought = await self.fetch.fetch_files(card, givers)
        with open(brought.files["tokenizer.json"].path, "rb") as file:
            return file.read()


@pytest.fixture
async def rig(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(
            await component.DistributedRuntime.in_memory(
                component.MemoryCluster(), item_type=generate.Output
            )
        )
        yield Rig(runtime, tmp_path / "cache" / "models")


async def test_local_file_is_read_in_place(rig, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BODY)
    card = card_of(path)

    assert await rig.fetch.fetch_files(card, [await rig.giver(BODY)]) == card
    assert not rig.asked
    assert not rig.directory.exists()


async def test_file_with_another_checksum_is_not_used(rig, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(BODY[::-1])

    assert await rig.content(card_of(path), await rig.giver(BODY)) == BODY


async def test_remote_file_is_fetched_from_a_worker_once(rig):
    giver = await rig.giver(BODY)

    assert await rig.content(card_of(), giver) == BODY
    assert [offset for _, offset in rig.asked] == [0, model_card.PART_BYTES]
    assert await rig.content(card_of()) == BODY  # nobody is asked again


async def test_file_is_fetched_from_the_object_store_if_it_is_there(rig):
    url = await rig.runtime.services.object_store().put("k", BODY)

    assert await rig.content(card_of(url=url), await rig.giver(BODY)) == BODY
    assert not rig.asked


async def test_file_missing_in_the_object_store_is_fetched_from_a_worker(rig):
    assert await rig.content(card_of(url="memory://gone"), await rig.giver(BODY)) == BODY


async def test_worker_with_wrong_or_too_few_bytes_is_passed_over(rig):
    liar = await rig.giver(BODY[::-1], instances.EndpointName("a", "liar", "x"))
    short = await rig.giver(BODY[:10], instances.EndpointName("a", "short", "x"))
    gone = file_fetcher.FileProvider("memory:999", "x")

    with pytest.raises(errors.ConfigError, match=r"cannot read /nonexistent.*cannot fetch it"):
        await rig.content(card_of(), liar, gone)
    assert await rig.content(card_of(), liar, short, await rig.giver(BODY)) == BODY


async def test_error_without_a_provider_is_one_sentence(rig):
    with pytest.raises(errors.ConfigError, match=r"cannot read /nonexistent.*no worker gives"):
        await rig.fetch.fetch_files(card_of(), [])


@pytest.mark.parametrize(
    "fields", [{"checksum": "sha256:../../etc"}, {"size": loading.MAX_FILE_BYTES + 1}]
)
async def test_card_with_an_invalid_checksum_fetches_nothing(rig, fields):
    card = card_of(**fields)

    assert await rig.fetch.fetch_files(card, [await rig.giver(BODY)]) == card
    assert not rig.asked


async def test_device_that_a_card_names_is_not_opened(rig, monkeypatch):
    opened = []
    monkeypatch.setattr(pathlib.Path, "open", lambda path, *mode, **how: opened.append(path))
    with pytest.raises(errors.ConfigError, match="cannot read /dev/zero"):
        await rig.fetch.fetch_files(card_of("/dev/zero", b""), [])

    assert opened == []


async def test_error_names_a_cache_that_cannot_be_written(rig):
    rig.directory.parent.write_text("a file")

    with pytest.raises(errors.ConfigError, match="--model-cache"):
        await rig.fetch.fetch_files(card_of(), [await rig.giver(BODY)])


async def test_file_that_cannot_be_kept_leaves_nothing_in_the_cache(rig):
    """As on a full disk, where a frontend tries again every ten seconds."""
    card = card_of()
    cached = rig.directory / card.files["tokenizer.json"].checksum.removeprefix("sha256:")
    cached.mkdir(parents=True)
    with pytest.raises(errors.ConfigError, match="cannot keep"):
        await rig.content(card, await rig.giver(BODY))

    assert [*rig.directory.iterdir()] == [cached]


async def test_silent_worker_ends_the_fetch_after_the_timeout(rig, monkeypatch):
    monkeypatch.setattr(file_fetcher, "FETCH_TIMEOUT_S", 0.05)
    address = await rig.runtime.requests.serve("silent", lambda call: None)

    with pytest.raises(errors.ConfigError, match="did not come within"):
        await rig.fetch.fetch_files(card_of(), [file_fetcher.FileProvider(address, "silent")])


async def test_cache_is_bounded(rig, monkeypatch):
    monkeypatch.setattr(file_fetcher, "MAX_CACHED_FILES", 3)
    for number in range(5):
        body = b"%d" % number
        name = instances.EndpointName("a", f"c{number}", "x")
        await rig.content(card_of(body=body), await rig.giver(body, name))
        newest = hashlib.sha256(body).hexdigest()
        os.utime(rig.directory / newest, (number, number))

    assert newest in os.listdir(rig.directory)
    assert len(os.listdir(rig.directory)) == 3


async def test_file_that_another_process_renames_meanwhile_stops_no_fetch(rig):
    rig.directory.mkdir(parents=True, exist_ok=True)
    (rig.directory / "coming-another").symlink_to("renamed")  # listed, and not there any more

    assert await rig.content(card_of(body=b"new"), await rig.giver(b"new")) == b"new"


def test_cache_directory_is_the_configured_one_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert file_fetcher.cache_directory(None) == tmp_path / "pydynamo" / "models"
    assert str(file_fetcher.cache_directory("/a/b")) == "/a/b"


def test_user_without_a_home_has_the_cache_among_temporary_files(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = f"cache-{os.getuid()}"

    assert file_fetcher.cache_directory(None) == tmp_path / name / "pydynamo" / "models"


def test_cache_that_others_could_change_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"cache-{os.getuid()}").symlink_to(tmp_path)

    with pytest.raises(errors.ConfigError, match="is no directory: set --model-cache"):
        file_fetcher.cache_directory(None)


def test_cache_in_the_home_of_an_unknown_user_is_refused_in_a_sentence():
    with pytest.raises(errors.ConfigError, match="--model-cache ~no-such-user/cache: "):
        file_fetcher.cache_directory("~no-such-user/cache")
