import pytest

import embedding_server
from dynamo.base import errors
from dynamo.gateway import main


def test_flags_of_the_original_are_understood():
    flags = ["--config", "a.yaml", "--enable-api=false", "--secure=true", "--config=b.yaml"]

    assert main.translate_flags(flags) == [
        "--router-config",
        "a.yaml",
        "--no-enable-api",
        "--secure",
        "--router-config=b.yaml",
    ]


def test_flags_of_the_original_may_have_one_hyphen():
    flags = ["-config=a.yaml", "-config", "-b.yaml", "-api-port", "81", "-secure=false", "-h"]

    assert main.translate_flags(flags) == [
        *("--router-config=a.yaml", "--router-config", "-b.yaml"),
        *("--api-port", "81", "--no-secure", "-h"),
    ]


async def test_missing_configuration_is_named():
    with pytest.raises(errors.ConfigError, match="--config"):
        await main.serve(main.GatewayConfig())


async def test_discovery_is_not_joined_for_a_server_of_embeddings(tmp_path, monkeypatch):
    path = tmp_path / "router.yaml"
    path.write_text(embedding_server.CONFIG.format(url="http://127.0.0.1:1/v1"))
    served = []

    async def note_routing(_, routing, *others):
        served.append(routing.router.loaded.embeds)

    async def refuse(_):
        raise errors.ConfigError("--file-kv: a file system that is read only")

    monkeypatch.setattr(main, "_serve_routing", note_routing)
    monkeypatch.setattr(main.component.DistributedRuntime, "open", refuse)

    await main.serve(main.GatewayConfig(router_config=str(path)))

    assert served == [True]
