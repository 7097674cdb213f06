"""The part of the classification API that is for administrators: the configuration in force and its changes.

A change is checked as a file is. It holds in this process until its file changes or the process ends, and is never
written. Administrators show the key of `--admin-key-file`; without one they ask from this host. A browser may send
what any page tells it to, so a request with an `Origin` needs the key.
"""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.base import errors, membership
from dynamo.runtime.http import exchange
from dynamo.semantic import config, config_file, service

Answer = Callable[[exchange.Exchange], Awaitable[Any]]
_LEAST_KEY = 8  # characters
_KEY_HEADERS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie")


class SystemPromptChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a change of system prompts: of one decision, named as `category`, or of all that have one."""

    category: str = ""
    enabled: bool | None = None
    mode: Literal["replace", "insert"] | None = None


_decode_prompt_change = msgspec.json.Decoder(SystemPromptChange).decode


def read_key(path: Path) -> str:
    """Return the key of administrators in a file. Raises ConfigError."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"--admin-key-file: {path}: {error}") from error
    if len(key) < _LEAST_KEY:
        raise errors.ConfigError(
            f"--admin-key-file: {path}: expected a key of at least {_LEAST_KEY} characters"
        )
    return key


class Administration:
    """Answers administrators."""

    def __init__(self, routing: service.RoutingService, key: str | None) -> None:
        self._routing = routing
        self._key = key

    def restrict(self, answer: Answer) -> Answer:
        """Return an answer that only administrators get."""

        async def answer_administrator(client: exchange.Exchange) -> Any:
            self._check(client.request)
            return await answer(client)

        return answer_administrator

    def _check(self, request: exchange.Request) -> None:
        """Raise Unauthenticated or Forbidden for a request that is not an administrator's."""
        if self._key is not None:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            is_bearer = scheme.lower() == "bearer"
            key = bearer.strip() if is_bearer else request.headers.get("x-api-key", "")
            if not hmac.compare_digest(key.encode(), self._key.encode()):
                raise errors.Unauthenticated(
                    f"expected the key of --admin-key-file for {request.path}, as a bearer token"
                )
        elif "origin" in request.headers or not membership.is_loopback(
            request.peer.rpartition(":")[0]
        ):
            raise errors.Forbidden(
                f"expected {request.path} from this host and no browser, got it from {request.peer}: ask here, or "
                "start with --admin-key-file and send its key"
            )

    def describe_config(self) -> dict[str, Any]:
        """Return the configuration in force without its keys, its notes, and why the last file was refused."""
        settings: dict[str, Any] = msgspec.to_builtins(self._routing.router.settings)
        for model in settings["model_config"].values():
            if model["access_key"]:
                model["access_key"] = config_file.HIDDEN_KEY
        if milvus := settings["semantic_cache"]["milvus"]:
            auth = milvus["connection"]["auth"]
            auth["password"] = auth["password"] and config_file.HIDDEN_KEY
        for decision in settings["decisions"]:
            for plugin in decision["plugins"]:
                for pair in _list_headers(plugin["type"], plugin["configuration"]):
                    if pair["name"].lower() in _KEY_HEADERS:
                        pair["value"] = config_file.HIDDEN_KEY
        return {
            "config": settings,
            "notes": self._routing.router.loaded.notes,
            "last_error": self._routing.loader.last_error,
            **self._describe_source(),
        }

    def _describe_source(self) -> dict[str, Any]:
        loader = self._routing.loader
        message = "as in its file"
        if not loader.is_saved:
            message = (
                f"changed until {loader.path} changes or the process ends; not written to the file"
            )
        return {"is_saved": loader.is_saved, "message": message}

    async def answer_config_change(self, client: exchange.Exchange) -> dict[str, Any]:
        """Put a changed configuration in force, and return it."""
        await self._apply(client, client.request.body)
        return self.describe_config()

    def describe_system_prompts(self) -> dict[str, Any]:
        """Return the system prompt of each decision."""
        loaded = self._routing.router.loaded
        prompts = []
        for decision in loaded.settings.decisions:
            plugin = loaded.plugins[decision.name].get("system_prompt")
            plugin = plugin or config.SystemPromptPlugin(enabled=False)
            prompts.append(
                {
                    "category": decision.name,
                    "prompt": plugin.system_prompt,
                    "enabled": plugin.enabled,
                    "mode": plugin.mode,
                }
            )
        return {"system_prompts": prompts, **self._describe_source()}

    async def answer_prompt_change(self, client: exchange.Exchange) -> dict[str, Any]:
        """Switch system prompts on or off, or change where they are put. Raises InvalidRequest."""
        change = _decode_prompt_change(client.request.body)
        if change.enabled is None and change.mode is None:
            raise errors.InvalidRequest("expected enabled or mode, got neither")
        decisions = msgspec.to_builtins(self._routing.router.settings.decisions)
        plugins = [
            plugin["configuration"]
            for decision in decisions
            if change.category in ("", decision["name"])
            for plugin in decision["plugins"]
            if plugin["type"] == "system_prompt" and plugin["configuration"].get("system_prompt")
        ]
        if not plugins:
            known = [
                d["category"]
                for d in self.describe_system_prompts()["system_prompts"]
                if d["prompt"]
            ]
            raise errors.InvalidRequest.of_param(
                "category",
                f"expected a decision with a system prompt ({', '.join(known) or 'there is none'}), "
                f"got {change.category!r}",
            )
        for plugin in plugins:
            plugin |= {} if change.enabled is None else {"enabled": change.enabled}
            plugin |= {} if change.mode is None else {"mode": change.mode}
        await self._apply(client, msgspec.json.encode({"decisions": decisions}))
        return self.describe_system_prompts()

    async def _apply(self, client: exchange.Exchange, patch: bytes) -> None:
        loader, current = self._routing.loader, self._routing.router.settings
        loaded = await client.decode_body(lambda _: loader.read_change(patch))
        _restore_headers(loaded, current)
        loader.apply_change(loaded)


def _list_headers(plugin_type: str, configuration: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the headers that a plugin sets, each an object with its name and value."""
    if plugin_type != "header_mutation":
        return []
    return [*configuration.get("add", ()), *configuration.get("update", ())]


def _restore_headers(loaded: config_file.LoadedConfig, current: config.SemanticConfig) -> None:
    """Let headers whose values are hidden keep those that their decisions set now. Raises ConfigError."""
    value_by_name = {
        (decision.name, pair["name"].lower()): pair["value"]
        for decision in current.decisions
        for plugin in decision.plugins
        for pair in _list_headers(plugin.type, plugin.configuration)
    }
    for decision in loaded.settings.decisions:
        for plugin in decision.plugins:
            for pair in _list_headers(plugin.type, plugin.configuration):
                name = (decision.name, pair["name"].lower())
                if pair["value"] == config_file.HIDDEN_KEY and name not in value_by_name:
                    raise errors.ConfigError(
                        f"decisions.{decision.name}: header_mutation: expected the value of {pair['name']}, "
                        f"got {config_file.HIDDEN_KEY!r}, which stands for one that is hidden"
                    )
                if pair["value"] == config_file.HIDDEN_KEY:
                    pair["value"] = value_by_name[name]
                    mutation = msgspec.convert(plugin.configuration, config.HeaderMutationPlugin)
                    loaded.plugins[decision.name][plugin.type] = mutation
