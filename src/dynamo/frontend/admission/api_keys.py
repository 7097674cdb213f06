"""API keys: who was given one, and what it allows.

    [tenants.acme]                       # shared by the keys of a tenant
    tokens_per_minute = 100_000

    [[keys]]
    name = "alice"                       # for people: in messages and logs, instead of the key
    sha256 = "2bb80d53…"                 # of the key; or: key = "sk-…"
    tenant = "acme"
    models = ["storyteller"]             # all, if left out
    requests_per_minute = 60
    concurrent_streams = 4

A presented key is hashed and looked up by its hash, then the two hashes are compared in constant time. How long the
look-up takes could tell something about a hash, and a hash tells nothing about a key that hashes to it.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.frontend.admission import rate_limits

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
_BEARER = "bearer "


class ApiKeyEntry(rate_limits.RateLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as it stands in the file; exactly one of `key` and `sha256`."""

    name: _Name
    key: Annotated[str, msgspec.Meta(min_length=8)] | None = None
    sha256: _Sha256 | None = None
    tenant: _Name | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False  # may change what concerns everybody

    @property
    def digest(self) -> bytes:
        """Of the key. Raises ConfigError."""
        if (self.key is None) == (self.sha256 is None):
            raise errors.ConfigError(f"key {self.name!r}: expected either key or sha256")
        return hash_key(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")


class ApiKeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: tuple[ApiKeyEntry, ...] = ()
    tenants: dict[str, rate_limits.RateLimits] = {}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks, by its key."""

    entry: ApiKeyEntry
    digest: bytes
    accounts: tuple[rate_limits.RateAccount, ...]  # of the key, and of its tenant

    def may_ask(self, model: str) -> bool:
        """Is this model one of its own?"""
        return self.entry.models is None or model in self.entry.models


class ApiKeyRegistry:
    """All keys that are valid now. What was used is kept when the file changes."""

    def __init__(self) -> None:
        self._guest_by_digest: dict[bytes, ApiKey] = {}
        self._accounts: dict[str, rate_limits.RateAccount] = {}

    def __len__(self) -> int:
        return len(self._guest_by_digest)

    def replace(self, file: ApiKeyFile, now: float) -> None:
        """These keys from now on, and no others. Raises ConfigError and then keeps what it has."""
        entry_by_digest = _by_digest(file)
        wanted = {f"tenant {name!r}": one for name, one in file.tenants.items()}
        wanted |= {f"key {one.name!r}": one for one in file.keys}
        accounts = {name: self._account(name, limit, now) for name, limit in wanted.items()}
        self._accounts = accounts
        self._guest_by_digest = {
            digest: ApiKey(entry, digest, _accounts_of(entry, accounts))
            for digest, entry in entry_by_digest.items()
        }

    def identify(self, headers: Mapping[str, str]) -> ApiKey:
        """Who sent these headers. Raises Unauthenticated."""
        key = key_from_headers(headers)
        if key is None:
            raise errors.Unauthenticated(
                "expected an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        digest = hash_key(key)
        guest = self._guest_by_digest.get(digest)
        if guest is None or not hmac.compare_digest(guest.digest, digest):
            raise errors.Unauthenticated("the API key is not valid: check it, or ask for a new one")
        return guest

    def _account(
        self, name: str, limit: rate_limits.RateLimits, now: float
    ) -> rate_limits.RateAccount:
        known = self._accounts.get(name)
        if known is None:
            return rate_limits.RateAccount(name, limit, now)
        known.change(limit, now)
        return known


def parse_key_file(content: str) -> ApiKeyFile:
    """The file from its text. Raises ConfigError, which quotes no key."""
    try:
        file = msgspec.convert(tomllib.loads(content), ApiKeyFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise errors.ConfigError(f"expected keys and tenants in TOML: {error}") from None
    _by_digest(file)
    return file


def hash_key(key: str) -> bytes:
    """SHA-256."""
    return hashlib.sha256(key.encode()).digest()


def key_from_headers(headers: Mapping[str, str]) -> str | None:
    """The key in these headers, as OpenAI's or as Anthropic's clients send it."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key")


def _accounts_of(
    entry: ApiKeyEntry, accounts: Mapping[str, rate_limits.RateAccount]
) -> tuple[rate_limits.RateAccount, ...]:
    own = accounts[f"key {entry.name!r}"]
    return (own,) if entry.tenant is None else (own, accounts[f"tenant {entry.tenant!r}"])


def _by_digest(file: ApiKeyFile) -> dict[bytes, ApiKeyEntry]:
    """The keys by what is compared. Raises ConfigError if two cannot be told apart, or a tenant is missing."""
    if len({one.name for one in file.keys}) < len(file.keys):
        raise errors.ConfigError("expected a name of its own for each key")
    found: dict[bytes, ApiKeyEntry] = {}
    for entry in file.keys:
        if entry.tenant is not None and entry.tenant not in file.tenants:
            raise errors.ConfigError(
                f"key {entry.name!r}: its tenant {entry.tenant!r} has no table [tenants.{entry.tenant}]"
            )
        twin = found.setdefault(entry.digest, entry)
        if twin is not entry:
            raise errors.ConfigError(f"keys {twin.name!r} and {entry.name!r} are the same key")
    return found
