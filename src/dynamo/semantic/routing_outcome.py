"""The outcome of a routed request: a request to forward or an answer to give at once, and why."""  # decider

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.base import addresses, errors
from dynamo.semantic import cache, config, decisions, guards, immediate, tool_database

ON, OFF = "on", "off"
ABSENT = "no live worker"  # why a model is struck out, whatever the request is
_MOST_NAME = 1000  # characters of a model's name in a header


@dataclass(slots=True, kw_only=True)
class Explanation:
    """Why a request went where it went: for headers, log, metrics and `explain`. It holds none of the text."""

    signals: decisions.Signals = field(default_factory=decisions.Signals)
    decision: str = ""
    reasons: tuple[str, ...] = ()
    confidence: float = 0.0
    requested_model: str = ""
    model: str = ""
    reasoning: str = OFF
    has_system_prompt: bool = False
    conversation: str = ""  # why the conversation stayed with its model or left it
    struck_out: dict[str, str] = field(default_factory=dict)  # why a model cannot serve the request
    barred: Mapping[str, str] = field(default_factory=dict)  # those hidden from the caller
    failed: str = ""  # the model that was asked before and failed
    verdicts: list[guards.GuardVerdict] = field(default_factory=list)
    observed: str = ""  # the decision that is only observed
    tools: tool_database.SelectedTools | None = None  # from the database, where it was asked
    path: str = "upstream"  # upstream, cache or blocked
    similarity: float | None = None
    cache_key: str = ""  # the name of the entry that the answer is from, or will be stored in

    @property
    def category(self) -> str:
        """Return the domain of the text, or nothing."""
        return "" if self.signals.domain_score is None else self.signals.domain_score.category

    def list_refusals(self) -> Iterable[str]:
        """Return the reasons against each model, and those against barred ones once, without their names."""
        items, barred = self.struck_out.items(), self.barred
        return dict.fromkeys(why if name in barred else f"{name}: {why}" for name, why in items)

    def refuse(self, models: Sequence[str]) -> errors.DynamoError:
        """Return the error of a request that none of these models can serve, with the reason for each.

        It is an InvalidRequest, caused by a NoWorkers, if all of them could serve another one.
        """
        reasons = "; ".join(self.list_refusals())
        text = f"no model can serve this request ({reasons or 'no decision applies and there is no default_model'})"
        absent = errors.NoWorkers(text)
        if not models or any(
            name in self.barred or self.struck_out[name] == ABSENT for name in models
        ):
            return absent
        unfit = errors.InvalidRequest(text)
        unfit.__cause__ = absent
        return unfit

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that tell the client of it."""
        tools = self.tools.tools if self.tools is not None else ()
        verdicts = {verdict.guard: verdict for verdict in self.verdicts}
        attack, pii = verdicts.get("jailbreak"), verdicts.get("pii")
        keywords = self.signals.keyword_rule or ""
        pairs = {
            "x-vsr-selected-category": self.category,
            "x-vsr-selected-decision": self.decision,
            "x-vsr-selected-confidence": f"{self.confidence:.4f}" if self.decision else "",
            "x-vsr-selected-reasoning": self.reasoning,
            "x-vsr-selected-model": self.model,
            "x-vsr-injected-system-prompt": "true" if self.has_system_prompt else "false",
            "x-vsr-matched-keywords": keywords,
            "x-vsr-matched-embeddings": self.signals.embedding_rule or "",
            "x-vsr-matched-domains": self.category,
            "x-vsr-selected-tools": ",".join(tool.name for tool in tools),
            "x-vsr-response-path": self.path,
            "x-vsr-conversation": self.conversation,
            "x-vsr-observed-decision": self.observed,
            "x-vsr-failed-model": self.failed,
            "x-vsr-cache-hit": "true" if self.path == "cache" else "",
            "x-vsr-cache-key": self.cache_key,
            "x-vsr-cache-similarity": "" if self.similarity is None else f"{self.similarity:.4f}",
            "x-vsr-unread-text": "" if all(v.is_complete for v in self.verdicts) else "true",
        }
        if attack is not None and attack.action in ("observe", "route"):
            pairs["x-vsr-jailbreak-observed"] = f"{attack.risk:.3f}"
        if pii is not None and pii.action in ("observe", "route"):
            pairs["x-vsr-pii-types"] = ",".join(pii.labels)
        return [  # a value that ended its line would begin another header
            (name, "".join(sign if " " <= sign <= "~" else "?" for sign in value)[:1000])
            for name, value in pairs.items()
            if value
        ]


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """What is to be done with a request."""

    explanation: Explanation
    body: bytes  # as it goes on; the very object that came if nothing changes
    answer: immediate.ImmediateAnswer | None = None  # to give at once
    upstream_headers: list[tuple[str, str]] = field(default_factory=list)
    removed_headers: list[str] = field(default_factory=list)
    is_chosen: bool = False  # the router has chosen the model, so another may take its place
    tenant: str = ""  # of the request
    routed_at: float = 0.0  # by the monotonic clock
    begun_at: float | None = None  # when the first piece of its answer came
    cache_key: cache.CacheKey | None = None  # under which the answer is to be stored
    settings: config.SemanticConfig | None = None  # by which it was routed

    def answer_headers(self) -> list[tuple[str, str]]:
        """Return the headers of the answer that is given at once, with those that tell the client of the choice."""
        pairs = [] if self.answer is None else list(self.answer.headers)
        names = {name for name, _ in pairs}
        return pairs + [pair for pair in self.explanation.headers() if pair[0] not in names]

    def add_upstream_headers(
        self, settings: config.SemanticConfig, plugins: Mapping[str, object]
    ) -> None:
        """Add the headers for the model's server: its key, its address, its name, and what the decision sets."""
        model = self.explanation.model
        entry = settings.find_model(model)
        if entry is not None and entry.access_key:
            self.upstream_headers.append(("authorization", f"Bearer {entry.access_key}"))
        by_name = {endpoint.name: endpoint for endpoint in settings.vllm_endpoints}
        names = entry.preferred_endpoints if entry is not None else ()
        if endpoints := [by_name[name] for name in names]:
            # of equal ones it is the first
            preferred = max(endpoints, key=lambda endpoint: endpoint.weight)
            address = addresses.join(preferred.address, preferred.port)
            self.upstream_headers.append(("x-vsr-destination-endpoint", address))
        if model.isprintable() and len(model) <= _MOST_NAME:  # it may be a client's invention
            self.upstream_headers.append(("x-selected-model", model))
        mutation = plugins.get("header_mutation")
        if isinstance(mutation, config.HeaderMutationPlugin):
            pairs = (*mutation.add, *mutation.update)
            self.upstream_headers += [(pair.name.lower(), pair.value) for pair in pairs]
            self.removed_headers += [name.lower() for name in mutation.delete]
