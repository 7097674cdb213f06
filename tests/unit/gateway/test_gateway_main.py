import pytest

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


async def test_missing_configuration_is_named():
    with pytest.raises(errors.ConfigError, match="--config"):
        await main.serve(main.GatewayConfig())
