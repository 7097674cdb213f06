"""The choice of a model: which can serve the request, which is best, and which the conversation had."""  # decider

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.base import clock as clocks
from dynamo.semantic import config, decisions, request_view, routing_outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is known of a model that live workers serve."""

    context_length: int | None = None
    accepts_images: bool = True
    accepts_tools: bool = True
    chooses_tools: bool = True  # a call is found in an answer that need not have one
    accepts_structured_output: bool = True


class ServedModels(Protocol):
    """The models that have live workers, as the process around the router knows them."""

    def find_served(self, model: str) -> ServedModel | None:
        """Return what a model can do; None if no worker serves it."""
        ...


class ConfiguredModels:
    """Takes every model for served, with the limits of the configuration: behind a gateway no worker is visible."""

    def __init__(self, settings: config.SemanticConfig) -> None:
        self._settings = settings

    def find_served(self, model: str) -> ServedModel | None:
        """Return what the configuration says of a model."""
        entry = self._settings.find_model(model)
        return ServedModel() if entry is None else limits_of(entry)


def limits_of(entry: config.ModelSettings) -> ServedModel:
    """Return the limits that the configuration sets for a model."""
    return ServedModel(
        context_length=entry.context_length,
        accepts_images=entry.accepts_images,
        accepts_tools=entry.accepts_tools,
        accepts_structured_output=entry.accepts_structured_output,
    )


def refusal_of(
    model: str,
    view: request_view.RequestView,
    served: ServedModels,
    settings: config.SemanticConfig,
) -> str | None:
    """Return why a model cannot serve a request; None if it can."""
    live = served.find_served(model)
    if live is None:
        return routing_outcome.ABSENT
    entry = settings.find_model(model)
    for limits in (live,) if entry is None else (live, limits_of(entry)):
        if view.has_images and not limits.accepts_images:
            return "it takes no images"
        if view.has_tools and not limits.accepts_tools:
            return "it calls no tools"
        if view.may_call and not limits.chooses_tools:
            return "it is not known how it writes tool calls; see --dyn-tool-call-parser"
        if view.wants_structure and not limits.accepts_structured_output:
            return "it cannot hold an answer to a schema"
        if limits.context_length is not None and view.least_context > limits.context_length:
            return f"the request needs some {view.least_context} tokens, it has {limits.context_length}"
    return None


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """What answered the last turn of a conversation."""

    decision: str
    model: str
    at: float


class ConversationMemory:
    """The last turn of each conversation, the oldest forgotten first."""

    def __init__(self, settings: config.Conversations, clock: clocks.Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._turns: collections.OrderedDict[str, AnsweredTurn] = collections.OrderedDict()
        # gets the keys of each turn that this process answers, from any thread
        self.on_remember: Callable[[Sequence[str], AnsweredTurn], None] | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def previous_turn(self, keys: Sequence[str]) -> AnsweredTurn | None:
        """Return the last turn of a conversation that has one of these keys; None after its idle time."""
        for key in keys:
            turn = self._turns.get(key)
            if turn is not None and self._clock.now() - turn.at <= self.settings.idle_seconds:
                return turn
        return None

    def remember(self, keys: Sequence[str], decision: str, model: str) -> None:
        """Note which model answers the present turn."""
        turn = self.note(keys, decision, model)
        if self.on_remember is not None and keys and self.settings.enabled:
            self.on_remember(keys, turn)

    def note(self, keys: Sequence[str], decision: str, model: str) -> AnsweredTurn:
        """Note a turn as it is answered here or, by what it says, at another process, and return it."""
        turn = AnsweredTurn(decision, model, self._clock.now())
        for key in keys:
            # large bodies are routed in a thread, which may forget it meanwhile
            self._turns.pop(key, None)
            self._turns[key] = turn
        while len(self._turns) > self.settings.max_conversations:
            self._turns.popitem(last=False)
        return turn


def conversation_key(tenant: str, name: str) -> str:
    """Return the key of a turn by the name of its session, the id of its response, or the hash of its messages.

    Sessions have names of any length, and other processes are told the keys: they name neither tenant nor session.
    """
    return hashlib.blake2b(f"{tenant}\n{name}".encode(), digest_size=16).hexdigest()


def conversation_keys(
    view: request_view.RequestView, headers: Mapping[str, str], tenant: str
) -> tuple[list[str], list[str]]:
    """Return the keys under which earlier turns were noted, and those under which this one is to be noted.

    The field `user` is no key: it names a person, or an application, with many conversations.
    """
    if session := headers.get("x-session-id"):
        key = conversation_key(tenant, session)
        return [key], [key]
    previous = view.fields.get("previous_response_id")
    earlier = [conversation_key(tenant, previous)] if isinstance(previous, str) else []
    users = [n for n, message in enumerate(view.messages) if message.get("role") == "user"]
    if not users:
        return earlier, []
    present = conversation_key(tenant, view.history_hash(users[-1] + 1))
    if len(view.messages) > users[-1] + 1:  # a tool result: the user's last message was answered
        earlier.append(present)
    if len(users) > 1:
        earlier.append(conversation_key(tenant, view.history_hash(users[-2] + 1)))
    return earlier, [present]


def remember_cached(
    memory: ConversationMemory,
    view: request_view.RequestView,
    headers: Mapping[str, str],
    outcome: routing_outcome.RoutedRequest,
) -> None:
    """Note a turn that the cache has answered: at the first model of its decision, unless it has one already."""
    explanation, settings = outcome.explanation, outcome.settings
    is_routed = any(verdict.action == "route" for verdict in explanation.verdicts)
    if settings is None or is_routed or view.model not in settings.auto_names:
        return
    _, present = conversation_keys(view, headers, outcome.tenant)
    turn = memory.previous_turn(present)
    if turn is not None and turn.decision == explanation.decision:
        return
    for decision in settings.decisions:
        if decision.name == explanation.decision and decision.modelRefs:
            memory.remember(present, decision.name, decision.modelRefs[0].served_name)


def stays_with(
    turn: AnsweredTurn,
    matches: Sequence[decisions.MatchedDecision],
    view: request_view.RequestView,
    settings: config.Conversations,
) -> tuple[bool, str]:
    """Return whether the conversation keeps the model of its last turn, and why."""
    if view.is_tool_result:
        return True, "a tool's result goes to the model that called it"
    strengths = decisions.strength_by_model(matches)
    kept = strengths.get(turn.model, 0.0)
    references = matches[0].settings.modelRefs if matches else []
    best = matches[0].strength if references else 0.0
    if references and references[0].served_name == turn.model:
        return True, "the same model is best"
    if best - kept >= settings.switch_margin and best >= settings.switch_margin:
        return False, f"a better model by {best - kept:.2f}"
    return True, f"no other model is better by {settings.switch_margin:g}"
