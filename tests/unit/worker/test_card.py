"""The model card of a worker, and the files that it serves."""

import contextlib
import dataclasses
import hashlib
import json

import pytest
from worker_fakes import FACTS

from dynamo.base import clock, errors
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component, requests
from dynamo.worker import card
from waiting import PATIENT_S


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def build(directory, **told):
    return card.build(directory, name="m", facts=FACTS, created=5, **told)


def test_files_are_named_by_size_and_checksum(directory):
    described = build(directory).files["tokenizer.json"]
    checksum = "sha256:" + hashlib.sha256(b'{"a": 1}').hexdigest()

    assert described == model_card.ModelFile(
        path=str(directory / "tokenizer.json"), checksum=checksum, size=8
    )


def test_weights_are_not_on_the_card(directory):
    assert set(build(directory).files) == {"config.json", "tokenizer.json"}


def test_template_for_tools_is_on_the_card(directory):
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>")

    described = build(directory).files["additional_chat_templates/tool_use.jinja"]

    assert described.path == str(directory / "additional_chat_templates" / "tool_use.jinja")


def test_template_elsewhere_replaces_all_templates_of_the_model(directory, tmp_path):
    (directory / "additional_chat_templates").mkdir()
    for name in ("chat_template.json", "additional_chat_templates/tool_use.jinja"):
        (directory / name).write_text("own")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}")
    files = card.describe_files(directory, str(other))

    assert set(files) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert files["chat_template.jinja"].path == str(other)


def test_fingerprint_of_the_weights_tells_names_sizes_and_contents_apart(directory):
    weights = directory / "model.safetensors"
    contents = (b"weights", b"weighty", b"weights ", bytes(1 << 20), bytes((1 << 20) - 1) + b"x")
    found = [build(directory).weights]
    for content in contents[1:]:
        weights.write_bytes(content)
        found.append(build(directory).weights)
    weights.rename(directory / "other.safetensors")
    found.append(build(directory).weights)

    assert len({*found}) == len(found)
    (directory / "other.safetensors").rename(weights)
    weights.write_bytes(contents[0])
    assert build(directory).weights == found[0]


def test_folder_and_dangling_link_are_no_weights(directory):
    fingerprint = card.fingerprint_weights(directory)
    (directory / "checkpoint.pt").mkdir()
    (directory / "pytorch_model.bin").symlink_to("missing")

    assert card.fingerprint_weights(directory) == fingerprint


def test_model_directory_without_weights_has_no_fingerprint(directory):
    (directory / "model.safetensors").unlink()

    assert not build(directory).weights


def test_card_has_the_facts_of_the_engine(directory):
    built = build(directory)

    assert (built.display_name, built.created) == ("m", 5)
    assert built.context_length == FACTS.context_length
    assert built.kv_cache_block_size == FACTS.kv_block_size
    assert built.runtime_config.total_kv_blocks == FACTS.total_kv_blocks


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": ""}])
def test_model_without_a_chat_template_has_no_chat_api(directory, config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))

    assert build(directory).model_type == (model_card.ModelType.COMPLETIONS,)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
    ],
)
def test_model_with_a_chat_template_has_the_chat_api(directory, file, content):
    (directory / file).write_text(content)

    assert model_card.ModelType.CHAT in build(directory).model_type


def test_parsers_of_answers_are_on_the_card(directory):
    told = build(directory, tool_call_parser="hermes", reasoning_parser="none").runtime_config

    assert (told.tool_call_parser, told.reasoning_parser) == ("hermes", "none")
    assert build(directory).runtime_config.tool_call_parser is None


def test_migration_limit_of_the_worker_is_on_the_card(directory):
    assert build(directory, migration_limit=1).migration_limit == 1
    assert build(directory).migration_limit is None


def test_malformed_tokenizer_config_is_named(directory):
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(errors.ConfigError, match=r"tokenizer_config.json: expected a JSON object"):
        build(directory)


def test_adapter_with_the_name_of_its_model_is_refused(directory):
    facts = dataclasses.replace(FACTS, lora_names=("poet",))

    assert card.build(directory, name="m", facts=facts, created=5).lora_names == ("poet",)
    with pytest.raises(errors.ConfigError, match="'poet', and so is its model"):
        card.build(directory, name="poet", facts=facts, created=5)


NAME = instances.EndpointName("a", "b", "generate")
BODY = bytes(range(256)) * 4096  # two parts


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


def card_of(file_path):
    checksum = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
    file = model_card.ModelFile(path=str(file_path), checksum=checksum, size=len(BODY))
    return model_card.ModelCard(
        display_name="m",
        source_path=str(file_path.parent),
        context_length=8,
        kv_cache_block_size=4,
        files={"tokenizer.json": file},
    )


@pytest.fixture
def file_path(tmp_path):
    file_path = tmp_path / "tokenizer.json"
    file_path.write_bytes(BODY)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return file_path


@contextlib.asynccontextmanager
async def sharing(file_path, store=None):
    """The card as it is published, and a way to ask for parts."""
    runtime = await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    )
    async with runtime:
        runtime.services = Services(store)
        shared = card.FileSharing(runtime, clock.SystemClock())
        published = await shared.share(card_of(file_path), NAME)
        served = await runtime.requests.serve("x", lambda call: None)

        async def ask(name, offset):
            return await requests.call(
                runtime.requests,
                served,
                model_card.model_files_path(NAME),
                model_card.FilePart(name=name, offset=offset),
                reply_type=bytes,
                timeout_s=PATIENT_S,
            )

        yield published, ask
        await shared.close()


async def test_file_is_served_in_parts_and_ends_with_an_empty_one(file_path):
    async with sharing(file_path) as (_, ask):
        first = await ask("tokenizer.json", 0)
        second = await ask("tokenizer.json", len(first))
        end = await ask("tokenizer.json", len(BODY))

    assert len(first) == model_card.PART_BYTES
    assert (first + second, end) == (BODY, b"")


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        *(("model.safetensors", 0), ("../secret", 0)),
        *(("tokenizer.json", -1), ("tokenizer.json", 2**63)),
    ],
)
async def test_file_that_is_not_on_the_card_is_not_served(file_path, name, offset):
    async with sharing(file_path) as (_, ask):
        with pytest.raises(errors.RemoteProtocolError, match="on the card"):
            await ask(name, offset)


async def test_missing_file_raises_unavailable(file_path):
    async with sharing(file_path) as (_, ask):
        file_path.unlink()
        with pytest.raises(errors.Unavailable, match="cannot read its own"):
            await ask("tokenizer.json", 0)


async def test_card_without_an_object_store_is_unchanged(file_path):
    async with sharing(file_path) as (card, _):
        assert card == card_of(file_path)


async def test_card_with_an_object_store_has_urls_of_its_files(file_path):
    store = Store()
    async with sharing(file_path, store) as (card, _):
        file = card.files["tokenizer.json"]

    assert file.url == f"store://{file.checksum.replace(':', '-')}"
    assert store.bodies == {file.checksum.replace(":", "-"): BODY}


async def test_failing_store_is_logged_and_the_worker_serves_the_file(file_path, caplog):
    store = Store()
    store.error = errors.Overloaded("it is full")
    async with sharing(file_path, store) as (card, ask):
        assert card == card_of(file_path)
        assert await ask("tokenizer.json", 0)
    assert "it is full" in caplog.text
