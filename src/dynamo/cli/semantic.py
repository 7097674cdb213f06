"""`dynamo semantic`: check a configuration of the semantic router, explain what it would do with a prompt, or replay.

Replaying gives recorded requests to a new configuration, and says what would change for them.
"""

import asyncio
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import config, distribution, errors
from dynamo.protocols import encoders as protocol
from dynamo.semantic import request_view

if typing.TYPE_CHECKING:
    from dynamo.semantic import guards, replay, router, service
    from dynamo.worker import classifier_set

_FEATURE = "dynamo semantic"
_PART = 64  # texts for which a server of embeddings is asked at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticCommandConfig:
    """Check a configuration of the semantic router, explain its decision, or replay requests with a new one."""

    action: Literal["check", "explain", "replay"] = config.option(
        flag="", help="check CONFIG.YAML, explain TEXT, or replay TRACE"
    )
    subject: str = config.option(
        flag="", help="the configuration file, the prompt, or a file of requests (audit log)"
    )
    semantic_router: str | None = config.setting(
        None, help="configuration file to explain by, or that replayed requests had"
    )
    new_config: str | None = config.option(
        None, flag="--config", help="configuration file that replayed requests are to get"
    )
    model: str = config.option("auto", help="the model that the explained request names")


def run(options: SemanticCommandConfig) -> int:
    """Check, explain or replay, and return the exit code. Raises ConfigError."""
    if options.action != "replay" and options.new_config is not None:
        raise errors.ConfigError(f"--config: has no effect with {options.action}, only with replay")
    if options.action != "explain" and options.model != "auto":
        raise errors.ConfigError(f"--model: has no effect with {options.action}, only with explain")
    if options.action == "replay":
        return _replay(options)
    module = distribution.load_extra("dynamo.semantic.service", feature=_FEATURE, extra="semantic")
    loader = typing.cast("type[service.RouterLoader]", module.RouterLoader)
    if options.action == "check":
        loaded = loader(Path(options.subject), clocks.SystemClock()).router.loaded
        for note in loaded.notes:
            print(f"note: {note}")
        settings = loaded.settings
        print(
            f"{options.subject}: valid; {len(settings.decisions)} decisions, "
            f"{len(settings.keyword_rules)} keyword rules, {len(settings.model_config)} models"
        )
        return 0
    if options.semantic_router is None:
        raise errors.ConfigError(
            "dynamo semantic explain: expected --semantic-router CONFIG.YAML or DYN_SEMANTIC_ROUTER"
        )
    made = loader(Path(options.semantic_router), clocks.SystemClock()).router
    encoders = LocalEncoders((options.semantic_router, made))
    for line in explain(made, options.subject, options.model, encoders):
        print(line)
    return 0


def _replay(options: SemanticCommandConfig) -> int:
    if options.new_config is None:
        raise errors.ConfigError("dynamo semantic replay: expected --config CONFIG.YAML")
    module = distribution.load_extra("dynamo.semantic.service", feature=_FEATURE, extra="semantic")
    loader = typing.cast("type[service.RouterLoader]", module.RouterLoader)
    comparing = distribution.load_extra(
        "dynamo.semantic.replay", feature=_FEATURE, extra="semantic"
    )
    new, old = (
        None if path is None else loader(Path(path), clocks.SystemClock()).router
        for path in (options.new_config, options.semantic_router)
    )
    encoders = LocalEncoders((options.new_config, new), (options.semantic_router, old))
    requests = comparing.read_requests(Path(options.subject))
    report = typing.cast(
        "replay.ReplayReport", comparing.compare(requests, new, old, encoders.read)
    )
    for line in report.lines():
        print(line)
    return 0


class LocalEncoders:
    """The encoders of configurations, loaded into this process where a configuration names any. Raises ConfigError.

    A server of embeddings is asked, as the frontend asks it.
    """

    def __init__(self, *routers: "tuple[str | None, router.SemanticRouter | None]") -> None:
        """Each router comes with the file of its configuration."""
        by_path: dict[str | None, classifier_set.ClassifierSet] = {}
        self._sets: list[tuple[router.SemanticRouter, classifier_set.ClassifierSet]] = []
        for path, made in routers:
            if made is None or not made.loaded.uses_process:
                continue
            if path not in by_path:
                module = distribution.load_extra(
                    "dynamo.worker.semantic_encoder",
                    feature=f"{_FEATURE} with encoders",
                    extra="native",
                )
                by_path[path] = module.load_models(module.SemanticEncoderConfig(router_config=path))
            self._sets.append((made, by_path[path]))

    def read(
        self, made: "router.SemanticRouter", body: bytes
    ) -> "guards.RequestClassifiers | None":
        """Return the classifiers for a request, after the router's encoders have read it; None: the shipped ones."""
        loaded = next((classifiers for owner, classifiers in self._sets if owner is made), None)
        if loaded is None and not made.loaded.embeds:
            return None
        try:
            inputs = made.list_inputs(request_view.RequestView(body))
        except errors.InvalidRequest:
            return None  # `route` refuses the request
        missing = made.references.missing()
        inputs = [*inputs, *made.list_embedding_inputs(missing)]
        answers = _ask_server(made, inputs)
        if loaded is not None:
            inputs = [one for one in inputs if one.classifier in loaded.names]
            keys = [(one.classifier, one.text) for one in inputs]
            answers |= dict(zip(keys, loaded.classify(inputs), strict=True))
        made.references.add(answers)
        return made.use_answers(answers)


def _ask_server(
    made: "router.SemanticRouter", inputs: Sequence[protocol.ClassifierInput]
) -> dict[tuple[str, str], protocol.TextLabels]:
    """Return the vectors of the texts that a configuration has a server of embeddings compute; none without one."""
    settings = made.settings.encoders
    if not settings.embeddings_url:
        return {}
    served = distribution.load_extra(
        "dynamo.semantic.served_embeddings", feature=_FEATURE, extra="semantic"
    )
    name = served.encoder_labels.EMBEDDING
    texts = [entry.text for entry in inputs if entry.classifier == name]
    parts = [texts[start : start + _PART] for start in range(0, len(texts), _PART)]
    answers: dict[tuple[str, str], protocol.TextLabels] = {}
    for part in parts:
        answers |= asyncio.run(served.embed_texts(part, settings))
    return answers


def explain(
    made: "router.SemanticRouter", text: str, model: str, encoders: LocalEncoders
) -> Iterator[str]:
    """Yield the lines that say what the router would do with a prompt, and why."""
    message = {"role": "user", "content": text}
    body = msgspec.json.encode({"model": model, "messages": [message]})
    classifiers = encoders.read(made, body)
    signals = made.find_signals(text, classifiers)
    yield f"keyword rule: {signals.keyword_rule or 'none'}"
    if made.settings.embedding_rules:
        reason = f" ({signals.missing_embedding})" if signals.missing_embedding else ""
        yield f"embedding rule: {signals.embedding_rule or 'none'}{reason}"
    if signals.domain_score is not None:
        probabilities = signals.domain_score.probabilities.items()
        best = sorted(probabilities, key=lambda item: -item[1])[:3]
        chances = ", ".join(f"{name} {share:.2f}" for name, share in best)
        yield f"domain: {signals.domain_score.category} ({chances})"
    for match in made.matches(signals):
        reasons = " and ".join(match.reasons)
        yield f"decision {match.settings.name} applies: {reasons} (priority {match.settings.priority})"
    try:
        outcome = made.route(body, {}, classifiers=classifiers)
    except errors.DynamoError as error:
        yield f"refused: {error}"
        return
    for verdict in outcome.explanation.verdicts:
        labels = ", ".join(verdict.labels)
        yield f"guard {verdict.guard}: {verdict.action} {labels} {verdict.reason}".rstrip()
    for name, reason in outcome.explanation.struck_out.items():
        yield f"model {name} is struck out: {reason}"
    for header, value in outcome.explanation.headers():
        yield f"{header}: {value}"
    if outcome.answer is not None:
        yield f"answered at once with status {outcome.answer.status}"
    elif outcome.body != body:
        yield f"request: {outcome.body.decode()}"
