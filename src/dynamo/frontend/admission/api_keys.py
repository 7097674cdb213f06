"""API keys: the file that lists them, and the registry that finds the key of a request.

    share_prefix_cache = false           # between tenants; true makes what others asked measurable
    [tenants.acme]                       # limits that the keys of a tenant share
    tokens_per_minute = 100_000

    [[keys]]
    name = "alice"                       # shown in messages and logs instead of the key
    sha256 = "2bb80d53…"                 # of the key; or: key = "sk-…"
    tenant = "acme"
    models = ["storyteller"]             # all, if left out
    may_choose_worker = true             # by header or nvext, as a gateway does
    may_set_priority = true
    requests_per_minute = 60
    concurrent_streams = 4

The key of a request is hashed and looked up by its hash, then the two hashes are compared in constant time. The time of
the look-up could tell something about a hash, and a hash tells nothing about a key that hashes to it.
"""  # decider

import hashlib
import hmac
import secrets
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
    """One key of the file; it has exactly one of `key` and `sha256`."""

    name: _Name
    key: Annotated[str, msgspec.Meta(min_length=8)] | None = None
    sha256: _Sha256 | None = None
    tenant: _Name | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False  # may use the routes that concern all clients
    may_choose_worker: bool = False
    may_set_priority: bool = False

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 hash of the key. Raises ConfigError if the entry has not exactly one of its forms."""
        if (self.key is None) == (self.sha256 is None):
            raise errors.ConfigError(f"key {self.name!r}: expected either key or sha256")
        return hash_key(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")


class ApiKeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: tuple[ApiKeyEntry, ...] = ()
    tenants: dict[str, rate_limits.RateLimits] = {}
    share_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A valid key, with the accounts that its requests are charged to: its own, and its tenant's."""

    entry: ApiKeyEntry
    digest: bytes
    accounts: tuple[rate_limits.RateAccount, ...]

    @property
    def tenant(self) -> str:
        """The owner of what its requests leave behind: its tenant, or the key itself if it has none."""
        entry = self.entry
        return f"key {entry.name}" if entry.tenant is None else f"tenant {entry.tenant}"

    def check_rights(self, *, chooses_worker: bool, sets_priority: bool) -> None:
        """Raise Forbidden for what the key may not do."""
        if chooses_worker and not self.entry.may_choose_worker:
            raise errors.Forbidden(
                f"the key {self.entry.name!r} may not choose a worker: leave out the routing headers and nvext "
                "fields, or ask for a key with may_choose_worker = true"
            )
        if sets_priority and not self.entry.may_set_priority:
            raise errors.Forbidden(
                f"the key {self.entry.name!r} may not set a priority: leave it out, or ask for a key with "
                "may_set_priority = true"
            )

    def allows_model(self, model: str) -> bool:
        return self.entry.models is None or model in self.entry.models


class ApiKeyRegistry:
    """All keys that are valid now. The usage of a key is kept when the file changes."""

    def __init__(self) -> None:
        self._key_by_digest: dict[bytes, ApiKey] = {}
        # within this process, a key can be presented by its name behind this secret
        self._name_prefix = secrets.token_urlsafe(32)
        self._key_by_name_digest: dict[bytes, ApiKey] = {}
        self._accounts: dict[str, rate_limits.RateAccount] = {}
        self.shares_prefix_cache = False  # between tenants

    def __len__(self) -> int:
        return len(self._key_by_digest)

    @property
    def accounts(self) -> Mapping[str, rate_limits.RateAccount]:
        """Return the accounts of all keys and tenants, by name."""
        return self._accounts

    def replace_keys(self, file: ApiKeyFile, now: float) -> None:
        """Make the keys of the file the only valid ones. Raises ConfigError and then changes nothing."""
        entry_by_digest = _index_by_digest(file)
        limits_by_name = {f"tenant {name!r}": limits for name, limits in file.tenants.items()}
        limits_by_name |= {f"key {entry.name!r}": entry for entry in file.keys}
        accounts = {
            name: self._open_account(name, limits, now) for name, limits in limits_by_name.items()
        }
        self._accounts = accounts
        self.shares_prefix_cache = file.share_prefix_cache
        self._key_by_digest = {
            digest: ApiKey(entry, digest, _accounts_of(entry, accounts))
            for digest, entry in entry_by_digest.items()
        }
        self._key_by_name_digest = {
            digest: ApiKey(entry, digest, _accounts_of(entry, accounts))
            for entry in entry_by_digest.values()
            for digest in (hash_key(self._name_prefix + entry.name),)
        }

    def headers_of(self, name: str) -> Mapping[str, str]:
        """Return the headers by which this process itself asks with the rights of the key of this name."""
        return {"x-api-key": self._name_prefix + name}

    def authenticate(self, headers: Mapping[str, str]) -> ApiKey:
        """Return the key that a request with these headers presents. Raises Unauthenticated."""
        key = key_from_headers(headers)
        if key is None:
            raise errors.Unauthenticated(
                "expected an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        digest = hash_key(key)
        api_key = self._key_by_digest.get(digest) or self._key_by_name_digest.get(digest)
        if api_key is None or not hmac.compare_digest(api_key.digest, digest):
            raise errors.Unauthenticated("the API key is not valid: check it, or ask for a new one")
        return api_key

    def _open_account(
        self, name: str, limits: rate_limits.RateLimits, now: float
    ) -> rate_limits.RateAccount:
        """Return the account of this name with these limits; one that exists keeps its usage."""
        account = self._accounts.get(name)
        if account is None:
            return rate_limits.RateAccount(name, limits, now)
        account.set_limits(limits, now)
        return account


def parse_key_file(content: str) -> ApiKeyFile:
    """Parse the TOML text of a key file. Raises ConfigError with a message that quotes no key."""
    try:
        file = msgspec.convert(tomllib.loads(content), ApiKeyFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise errors.ConfigError(f"expected keys and tenants in TOML: {error}") from None
    _index_by_digest(file)
    return file


def hash_key(key: str) -> bytes:
    """Return the SHA-256 hash of a key."""
    return hashlib.sha256(key.encode()).digest()


def key_from_headers(headers: Mapping[str, str]) -> str | None:
    """Return the key in these headers, as OpenAI's or Anthropic's clients send it; None if there is none."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key")


def _accounts_of(
    entry: ApiKeyEntry, accounts: Mapping[str, rate_limits.RateAccount]
) -> tuple[rate_limits.RateAccount, ...]:
    own = accounts[f"key {entry.name!r}"]
    return (own,) if entry.tenant is None else (own, accounts[f"tenant {entry.tenant!r}"])


def _index_by_digest(file: ApiKeyFile) -> dict[bytes, ApiKeyEntry]:
    """Index the keys by their hashes. Raises ConfigError for equal names, equal keys or an unknown tenant."""
    if len({entry.name for entry in file.keys}) < len(file.keys):
        raise errors.ConfigError("expected a name of its own for each key")
    entry_by_digest: dict[bytes, ApiKeyEntry] = {}
    for entry in file.keys:
        if entry.tenant is not None and entry.tenant not in file.tenants:
            raise errors.ConfigError(
                f"key {entry.name!r}: its tenant {entry.tenant!r} has no table [tenants.{entry.tenant}]"
            )
        twin = entry_by_digest.setdefault(entry.digest, entry)
        if twin is not entry:
            raise errors.ConfigError(f"keys {twin.name!r} and {entry.name!r} are the same key")
    return entry_by_digest
