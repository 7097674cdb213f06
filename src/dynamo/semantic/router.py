"""The semantic router: the whole order of steps from a request to its outcome, without any I/O.

Signals, decision, guards, cache, model, changes of the body. The outcome is a value with its reasons: a request to
forward, or an answer to give at once. Processes around it (frontend, gateway, command line) act on it.
"""  # decider

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.semantic import (
    cache,
    config,
    config_file,
    decisions,
    encoder_labels,
    encoder_scores,
    guards,
    immediate,
    model_choice,
    request_view,
    rewriting,
    routing_outcome,
    similarity,
    tool_database,
)
from dynamo.semantic.classifiers import profile

FALLBACK = "default_model"
_RESPONSE_ID = re.compile(rb'"id" ?: ?"(resp_[A-Za-z0-9_-]{1,100})"')
_ID_WITHIN = 4096  # bytes of an answer; an id stands before what the model said


class SemanticRouter:
    """The deciders of one configuration, and the memory that outlives it."""

    def __init__(
        self,
        loaded: config_file.LoadedConfig,
        classifiers: profile.FastProfile,
        clock: clocks.Clock,
        served: model_choice.ServedModels | None = None,
        mutex: cache.Mutex = cache.UNSHARED,
    ) -> None:
        """`mutex` is for the cache of a router that routes in several threads."""
        self._mutex = mutex
        self._classifiers = classifiers
        self._clock = clock
        self._chosen_models = served
        self.settings = loaded.settings
        self.conversations = model_choice.ConversationMemory(loaded.settings.conversations, clock)
        self.cache = cache.SemanticCache(loaded.settings.semantic_cache, clock, mutex)
        self._use_config(loaded)

    def with_config(self, loaded: config_file.LoadedConfig) -> "SemanticRouter":
        """Return a router of another configuration. Conversations stay; the cache of a changed one starts empty.

        This one stays as it is: a thread may be routing a large body by it.
        """
        other = copy.copy(self)
        other._use_config(loaded)
        return other

    def _use_config(self, loaded: config_file.LoadedConfig) -> None:
        if self.settings != loaded.settings:
            settings = loaded.settings.semantic_cache
            self.cache = cache.SemanticCache(settings, self._clock, self._mutex)
        self.loaded = loaded
        self.settings = loaded.settings
        self.conversations.settings = loaded.settings.conversations
        self.model_names = config.list_models(loaded.settings, loaded.plugins)
        self._known_names = self.model_names | loaded.settings.auto_names
        self._keywords = decisions.KeywordMatcher(self.settings.keyword_rules)
        rules = self.settings.embedding_rules
        self.references = similarity.ReferenceVectors(
            [
                *(text for rule in rules for text in rule.candidates),
                *(tool.description for tool in loaded.tools),
            ]
        )
        self._rules = similarity.SimilarityRules(rules, self.references)
        self._table = decisions.DecisionTable(self.settings)
        self._served = self._chosen_models or model_choice.ConfiguredModels(self.settings)

    def list_models(self) -> immediate.ImmediateAnswer:
        """Return the answer to `GET /v1/models`."""
        names = [self.settings.auto_model_name]
        if self.settings.include_config_models_in_list:
            names += self.settings.model_config
        return immediate.list_models(names, int(self._clock.wall()))

    @request_view.refuse_deep_values()
    def route(
        self,
        body: bytes,
        headers: Mapping[str, str],
        tenant: str = "",
        failed: Mapping[str, str] | None = None,
        classifiers: guards.RequestClassifiers | None = None,
        barred: Mapping[str, str] | None = None,
        api: rewriting.RequestApi = "chat",
    ) -> routing_outcome.RoutedRequest:
        """Return the outcome of a request. Raises InvalidRequest, and NoWorkers if no model is there.

        `failed` are models that were asked and failed, each with its reason, and `barred` those that the caller may
        not ask; they are struck out. `classifiers` have what the encoders answered for this request (`list_inputs`);
        by default the shipped classifiers are used. `api` is what the request asks: only answers of chat
        completions are cached, and each has its own field for reasoning.
        """
        classifiers = classifiers or self._classifiers
        view = request_view.RequestView(body, api)
        if not view.model:
            raise errors.InvalidRequest(
                f'"model": expected the name of a model, or "{self.settings.auto_model_name}" to have one chosen',
                param="model",
            )
        explanation = routing_outcome.Explanation(
            requested_model=view.model, failed=", ".join(failed or ()), barred=barred or {}
        )
        explanation.struck_out.update({**explanation.barred, **(failed or {})})
        outcome = routing_outcome.RoutedRequest(
            explanation=explanation, body=body, tenant=tenant, settings=self.settings
        )
        signals = explanation.signals = self.find_signals(view.user_text, classifiers)
        matches = list(self._table.matches(signals))
        if matches and matches[0].settings.mode == "observe":
            explanation.observed = matches[0].settings.name
        matches = [match for match in matches if match.settings.mode == "enforce"]
        is_auto = view.model in self.settings.auto_names
        match, kept = matches[0] if matches else None, ""
        earlier, present = model_choice.conversation_keys(view, headers, tenant)
        self._select_tools(view, classifiers, explanation)
        if is_auto and self.settings.conversations.enabled:
            match, kept = self._keep_conversation(match, matches, view, earlier, explanation)
        if match is not None:
            explanation.decision = match.settings.name
            explanation.reasons, explanation.confidence = match.reasons, match.confidence
        # the guards are those of the decision that is followed: its model gets the text
        route_to = self._guard(view, outcome, classifiers)
        if outcome.answer is not None:
            return outcome
        if route_to and kept:
            explanation.conversation = "switched: a guard sends the request to its own model"
        plugins = {} if match is None else self.loaded.plugins[match.settings.name]
        is_shared = api == "chat" and decisions.is_first(match, matches)
        plugin = plugins.get("semantic-cache") if is_shared else None
        if self._is_cached(view, headers, tenant, plugin, outcome):
            return outcome
        if not is_auto and not route_to:
            explanation.model = view.model
            outcome.add_upstream_headers(self.settings, plugins)
            return outcome
        reference = self._choose(match, kept, route_to, view, explanation)
        explanation.model, outcome.is_chosen = reference.served_name, True
        if match is not None:
            self._set_reasoning(outcome, view, reference, api)
        self._rewrite(outcome, view, match, reference, plugins, api)
        self.conversations.remember(present, explanation.decision, explanation.model)
        return outcome

    def knows(self, model: str) -> bool:
        """Return whether a model's name is in the configuration, or one of a model with live workers."""
        if model in self._known_names:
            return True
        return (
            self._chosen_models is not None and self._chosen_models.find_served(model) is not None
        )

    def remember_response(self, outcome: routing_outcome.RoutedRequest, data: bytes) -> None:
        """Note the id of a response, by which the next turn may name it; `data` is the first piece of its answer."""
        match = _RESPONSE_ID.search(data, 0, _ID_WITHIN)
        if match is not None and outcome.is_chosen:
            key = model_choice.conversation_key(outcome.tenant, match[1].decode())
            explanation = outcome.explanation
            self.conversations.remember([key], explanation.decision, explanation.model)

    @request_view.refuse_deep_values()
    def list_inputs(self, view: request_view.RequestView) -> list[encoders.ClassifierInput]:
        """Return the texts of a request that the encoders of the configuration have to read. Raises InvalidRequest."""
        needed = {
            encoder_labels.DOMAIN: self._table.needs_domain,
            encoder_labels.ATTACK: self._reads_attacks,
            encoder_labels.PII: self._has_guard("pii"),
        }
        texts = {
            encoder_labels.DOMAIN: [view.user_text] if view.user_text else [],
            encoder_labels.ATTACK: view.texts_beside(self.settings.prompt_guard.trusted_roles),
            encoder_labels.PII: view.texts,
        }
        inputs = self.list_inputs_for({name: texts[name] for name in texts if needed[name]})
        if self.settings.embedding_rules or self._wants_tools(view):
            inputs += self.list_embedding_inputs(texts[encoder_labels.DOMAIN])
        return inputs

    def list_embedding_inputs(self, texts: Sequence[str]) -> list[encoders.ClassifierInput]:
        """Return the texts whose vectors the encoder is asked for; none if nothing is compared by them."""
        if not self.loaded.embeds:
            return []
        name = encoder_labels.EMBEDDING
        return [encoders.ClassifierInput(name, text) for text in dict.fromkeys(texts)]

    def list_inputs_for(
        self, texts_by_classifier: Mapping[str, Sequence[str]]
    ) -> list[encoders.ClassifierInput]:
        """Return what the encoders have to read of these texts, by classifier."""
        return encoder_scores.list_inputs(
            self.loaded.encoders,
            self.settings.encoders.profile,
            self._classifiers,
            texts_by_classifier,
        )

    def use_answers(self, answers: encoder_scores.Answers) -> guards.RequestClassifiers:
        """Return the classifiers for a request after the encoders have read its texts."""
        fallback = self.settings.classifier.category_model.fallback_category
        return encoder_scores.EncoderScores(
            self._classifiers, self.loaded.encoders, answers, fallback
        )

    @property
    def caches_answers(self) -> bool:
        """Return whether some decision answers from the cache."""
        plugins = (plugins.get("semantic-cache") for plugins in self.loaded.plugins.values())
        return any(plugin is not None and plugin.enabled for plugin in plugins)

    @property
    def _reads_attacks(self) -> bool:
        return self.settings.prompt_guard.enabled or self._has_guard("jailbreak")

    @property
    def has_guards(self) -> bool:
        """Return whether some request may be stopped by what it says."""
        return self._reads_attacks or self._has_guard("pii")

    def _has_guard(self, plugin_type: str) -> bool:
        return any(plugin_type in plugins for plugins in self.loaded.plugins.values())

    def find_signals(
        self, text: str, classifiers: guards.RequestClassifiers | None = None
    ) -> decisions.Signals:
        """Return the signals of a text; the domain only where a decision asks for it."""
        classifiers = classifiers or self._classifiers
        score = classifiers.classify_domain(text) if self._table.needs_domain else None
        names = frozenset() if score is None else self._table.names_of(score.category)
        similar = self._rules.match(classifiers.embed(text)) if text else similarity.RuleMatch()
        return decisions.Signals(
            keyword_rule=self._keywords.match(text),
            embedding_rule=similar.rule,
            embedding_score=similar.score,
            missing_embedding=similar.missing,
            domain_score=score,
            domain_names=names,
        )

    def matches(self, signals: decisions.Signals) -> Sequence[decisions.MatchedDecision]:
        """Return the decisions that apply, for `explain`."""
        return self._table.matches(signals)

    def _guard(
        self,
        view: request_view.RequestView,
        outcome: routing_outcome.RoutedRequest,
        classifiers: guards.RequestClassifiers,
    ) -> str:
        """Let the guards read the request; return the model that one of them sends it to."""
        explanation = outcome.explanation
        plugins = self.loaded.plugins.get(explanation.decision, {})
        prompt_guard = self.settings.prompt_guard
        verdicts = (
            guards.check_attack(
                view.texts_beside(prompt_guard.trusted_roles),
                prompt_guard,
                plugins.get("jailbreak"),
                classifiers,
            ),
            guards.check_pii(
                view.texts,
                plugins.get("pii"),
                self.settings.classifier.pii_model.threshold,
                classifiers,
            ),
        )
        route_to = ""
        for verdict in verdicts:
            if verdict is None:
                continue
            if view.has_token_ids:
                verdict = dataclasses.replace(verdict, is_complete=False)
            explanation.verdicts.append(verdict)
            if verdict.action == "block":
                explanation.path = "blocked"
                outcome.answer = self._refuse(verdict, explanation, view)
                break
            if verdict.action == "route" and verdict.route_to:
                route_to = verdict.route_to
        return route_to

    def _wants_tools(self, view: request_view.RequestView) -> bool:
        """Return whether a request is to get tools of the database."""
        is_auto = view.model in self.settings.auto_names and view.messages_field == "messages"
        lets_choose = view.fields.get("tool_choice") == "auto"
        return self.settings.tools.enabled and is_auto and lets_choose

    def _select_tools(
        self,
        view: request_view.RequestView,
        classifiers: guards.RequestClassifiers,
        explanation: routing_outcome.Explanation,
    ) -> None:
        """Note the tools that a request gets, before a model is chosen, which must be able to call them."""
        if not self._wants_tools(view):
            return
        settings = self.settings.tools
        threshold = settings.similarity_threshold
        if threshold is None:
            threshold = self.settings.bert_model.threshold
        explanation.tools = tool_database.select(
            self.loaded.tools,
            settings,
            threshold,
            classifiers.embed(view.user_text),
            self.references,
        )
        if not explanation.tools.keeps:
            view.has_tools = bool(explanation.tools.tools)

    def _refuse(
        self,
        verdict: guards.GuardVerdict,
        explanation: routing_outcome.Explanation,
        view: request_view.RequestView,
    ) -> immediate.ImmediateAnswer:
        created, is_stream = int(self._clock.wall()), view.is_stream
        if verdict.guard == "pii":
            name, category = explanation.decision or FALLBACK, explanation.category
            return immediate.refuse_pii(
                verdict.labels, name, category, created, is_stream=is_stream
            )
        kind = guards.FAILURE if guards.FAILURE in verdict.labels else "jailbreak"
        return immediate.refuse_attack(kind, verdict.risk, created, is_stream=is_stream)

    def _keep_conversation(
        self,
        match: decisions.MatchedDecision | None,
        matches: Sequence[decisions.MatchedDecision],
        view: request_view.RequestView,
        keys: Sequence[str],
        explanation: routing_outcome.Explanation,
    ) -> tuple[decisions.MatchedDecision | None, str]:
        """Return the decision of the conversation's last turn and its model, if it is to be kept."""
        turn = self.conversations.previous_turn(keys)
        if turn is None:
            return match, ""
        stays, reason = model_choice.stays_with(turn, matches, view, self.settings.conversations)
        if stays:
            refusal = explanation.struck_out.get(turn.model) or model_choice.refusal_of(
                turn.model, view, self._served, self.settings
            )
            if refusal is not None:
                stays, reason = False, refusal
        explanation.conversation = f"{'stayed' if stays else 'switched'}: {reason}"
        if not stays:
            return match, ""
        references = [] if match is None or view.is_tool_result else match.settings.modelRefs
        if references and references[0].served_name == turn.model:
            return match, turn.model  # the text's own decision has that model, too
        earlier = next((d for d in self.settings.decisions if d.name == turn.decision), None)
        if earlier is None or earlier.mode == "observe":
            return (match if turn.decision else None), turn.model
        confidence = match.confidence if match is not None else 0.0
        kept = decisions.MatchedDecision(
            settings=earlier, confidence=confidence, strength=0.0, reasons=("conversation",)
        )
        return kept, turn.model

    def _is_cached(
        self,
        view: request_view.RequestView,
        headers: Mapping[str, str],
        tenant: str,
        plugin: config.CachePlugin | None,
        outcome: routing_outcome.RoutedRequest,
    ) -> bool:
        """Answer from the cache and return True, or note the key under which the answer is to be stored."""
        if not self.settings.semantic_cache.enabled or plugin is None or not plugin.enabled:
            return False
        for name in cache.names_to_delete(headers):
            self.cache.delete(name, tenant)
        key = cache.make_key(view, headers, tenant)
        if key is None or view.has_tools:
            return False
        key = dataclasses.replace(key, decision=outcome.explanation.decision)
        thresholds = (
            plugin.similarity_threshold,
            self.settings.semantic_cache.similarity_threshold,
            self.settings.bert_model.threshold,
        )
        threshold = next(threshold for threshold in thresholds if threshold is not None)
        explanation = outcome.explanation
        explanation.cache_key = key.name
        hit = self.cache.find(key, threshold)
        if hit is None:
            outcome.cache_key = key
            return False
        explanation.path, explanation.similarity = "cache", hit.similarity
        model_choice.remember_cached(self.conversations, view, headers, outcome)
        outcome.answer = immediate.replay(
            hit.body,
            int(self._clock.wall()),
            explanation.headers(),
            is_stream=view.is_stream,
            wants_usage=view.wants_usage,
        )
        return True

    def _choose(
        self,
        match: decisions.MatchedDecision | None,
        kept: str,
        route_to: str,
        view: request_view.RequestView,
        explanation: routing_outcome.Explanation,
    ) -> config.ModelReference:
        """Return the first model that can serve the request. Raises NoWorkers or InvalidRequest, with their reasons.

        No other model gets what a guard sends to its own (`route_to`).
        """
        preferred = route_to or kept
        references = [] if match is None else list(match.settings.modelRefs)
        if preferred and preferred not in [reference.served_name for reference in references]:
            references.insert(0, config.ModelReference(model=preferred))
        references.sort(key=lambda reference: reference.served_name != preferred)
        if route_to:
            del references[1:]
        elif self.settings.default_model:
            references.append(config.ModelReference(model=self.settings.default_model))
        for reference in references:
            name = reference.served_name
            if name in explanation.struck_out:
                continue
            refusal = model_choice.refusal_of(name, view, self._served, self.settings)
            if refusal is None:
                return reference
            explanation.struck_out[name] = refusal
        raise explanation.refuse([reference.served_name for reference in references])

    def _set_reasoning(
        self,
        outcome: routing_outcome.RoutedRequest,
        view: request_view.RequestView,
        reference: config.ModelReference,
        api: rewriting.RequestApi,
    ) -> None:
        """Switch reasoning on or off in the body, in the way of the model's family, if the API has a field for it."""
        entry = self.settings.find_model(reference.model)
        name = (entry.reasoning_family if entry is not None else None) or ""
        family = self.settings.reasoning_families.get(name)
        if not rewriting.can_set_reasoning(api, view.fields, family):
            return
        effort = None
        if reference.use_reasoning:
            outcome.explanation.reasoning = routing_outcome.ON
            effort = reference.reasoning_effort or self.settings.default_reasoning_effort
        outcome.body = rewriting.set_reasoning(
            outcome.body, view.fields, family, effort=effort, api=api
        )

    def _rewrite(
        self,
        outcome: routing_outcome.RoutedRequest,
        view: request_view.RequestView,
        match: decisions.MatchedDecision | None,
        reference: config.ModelReference,
        plugins: Mapping[str, object],
        api: rewriting.RequestApi,
    ) -> None:
        """Change the body for the model that was chosen."""
        explanation = outcome.explanation
        body = rewriting.set_model(outcome.body, reference.served_name)
        if match is not None:
            prompt = plugins.get("system_prompt")
            if (
                isinstance(prompt, config.SystemPromptPlugin)
                and prompt.enabled
                and prompt.system_prompt
            ):
                changed = rewriting.set_system_prompt(
                    body, view, prompt.system_prompt, is_inserted=prompt.mode == "insert", api=api
                )
                explanation.has_system_prompt, body = changed is not body, changed
        if explanation.tools is not None and not explanation.tools.keeps:
            body = rewriting.set_tools(body, [tool.definition for tool in explanation.tools.tools])
        outcome.body = body
        outcome.add_upstream_headers(self.settings, plugins)
