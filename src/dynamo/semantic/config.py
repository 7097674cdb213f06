"""The configuration of the semantic router: the original's v0.1, its types and what each key may say.

Keys of our own, all optional: `default_plugins`, `mode`, `route_to` and `on_error` of guards, `mode` of decisions,
`encoders`, `conversations`, and the limits of a model (`context_length`, `accepts_images`, `accepts_tools`,
`accepts_structured_output`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.semantic import milvus_config

GuardMode = Literal["enforce", "observe", "route"]
OnError = Literal["pass", "block"]
Operator = Literal["AND", "OR", "NOR", "NOT"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Price = Annotated[float, msgspec.Meta(ge=0)]  # of a million tokens
HeaderName = Annotated[str, msgspec.Meta(pattern=r"^:?[A-Za-z0-9!#$%&'*+.^_`|~-]+(?!\n)$")]
HeaderText = Annotated[
    str, msgspec.Meta(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]*(?!\n)$")
]  # of one line
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all sections; a key that a section does not have is named in the notes."""


class KeywordRule(_Section, frozen=True, kw_only=True):
    """A signal that is present if its keywords are: any (OR), all (AND) or none (NOR)."""

    name: str
    operator: Literal["AND", "OR", "NOR"] = "OR"
    keywords: list[str] = []
    case_sensitive: bool = False


class ModelPreference(_Section, frozen=True, kw_only=True):
    """How well a model answers questions of a category."""

    model: str
    score: float = 0.0
    use_reasoning: bool | None = None


class EmbeddingRule(_Section, frozen=True, kw_only=True):
    """A signal that is present if the text is similar to the candidates: to one (any, max), or to all (mean)."""

    name: str
    threshold: Share = 0.7
    candidates: list[str] = []
    aggregation_method: Literal["mean", "max", "any"] = "max"


class Category(_Section, frozen=True, kw_only=True):
    """A domain by a name of one's own, as a set of the classifier's categories."""

    name: str
    description: str = ""
    mmlu_categories: list[str] = []
    model_scores: list[ModelPreference] = []


class ReasoningFamily(_Section, frozen=True, kw_only=True):
    """How the models of a family are told to think."""

    type: Literal["chat_template_kwargs", "reasoning_effort"]
    parameter: str = "thinking"


class VllmEndpoint(_Section, frozen=True, kw_only=True):
    """The address of a server, for the gateway's destination header; of several the one with the highest weight."""

    name: str
    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    weight: float = 1.0


class LoraName(_Section, frozen=True, kw_only=True):
    """A LoRA adapter of a model."""

    name: str
    description: str = ""


class Pricing(_Section, frozen=True, kw_only=True):
    """The price of a model's tokens."""

    currency: str = "USD"
    prompt_per_1m: Price = 0.0
    completion_per_1m: Price = 0.0


class ModelSettings(_Section, frozen=True, kw_only=True):
    """A model that requests may be sent to, with its limits where the router cannot see them itself."""

    preferred_endpoints: list[str] = []
    reasoning_family: str | None = None
    loras: list[LoraName] = []
    access_key: HeaderText | None = None
    pricing: Pricing | None = None
    context_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    accepts_images: bool = True
    accepts_tools: bool = True
    accepts_structured_output: bool = True


class Condition(_Section, frozen=True, kw_only=True):
    """A signal that a decision asks for, or conditions in their place. Published values spell `name` as `rule_name`."""

    type: str = ""
    name: str = ""
    rule_name: str = ""
    operator: Operator = "AND"
    conditions: list["Condition"] = []

    @property
    def signal(self) -> str:
        return self.name or self.rule_name


class RuleSet(_Section, frozen=True, kw_only=True):
    """The conditions of a decision: all of them (AND), any (OR) or none (NOR, NOT)."""

    operator: Operator = "AND"
    conditions: list[Condition] = []


class ModelReference(_Section, frozen=True, kw_only=True):
    """A model that a decision selects."""

    model: str
    lora_name: str | None = None
    use_reasoning: bool | None = None
    reasoning_description: str = ""
    reasoning_effort: str | None = None

    @property
    def served_name(self) -> str:
        """Return the name under which the model, or its adapter, is served."""
        return self.lora_name or self.model


class Plugin(_Section, frozen=True, kw_only=True):
    """A step that a decision adds; its configuration is decoded by type."""

    type: str
    configuration: dict[str, Any] = {}


class CachePlugin(_Section, frozen=True, kw_only=True):
    """Answers from the semantic cache."""

    enabled: bool = True
    similarity_threshold: Share | None = None


class JailbreakPlugin(_Section, frozen=True, kw_only=True):
    """The guard against attacks, as one decision wants it."""

    enabled: bool = True
    threshold: Share | None = None
    mode: GuardMode | None = None
    route_to: str | None = None


class PiiPlugin(_Section, frozen=True, kw_only=True):
    """The guard against personal data; a threshold of 0 switches it off."""

    enabled: bool = True
    threshold: Share | None = None
    pii_types_allowed: list[str] = []
    mode: GuardMode = "enforce"
    route_to: str | None = None
    on_error: OnError = "pass"


class SystemPromptPlugin(_Section, frozen=True, kw_only=True):
    """Sets the system prompt, or puts it before the client's."""

    enabled: bool = True
    system_prompt: str = ""
    mode: Literal["replace", "insert"] = "replace"


class HeaderValue(_Section, frozen=True, kw_only=True):
    """A header to set."""

    name: HeaderName
    value: HeaderText


class HeaderMutationPlugin(_Section, frozen=True, kw_only=True):
    """Changes the headers that the model's server gets."""

    add: list[HeaderValue] = []
    update: list[HeaderValue] = []
    delete: list[HeaderName] = []


PLUGIN_TYPES: dict[str, type[_Section]] = {
    "semantic-cache": CachePlugin,
    "jailbreak": JailbreakPlugin,
    "pii": PiiPlugin,
    "system_prompt": SystemPromptPlugin,
    "header_mutation": HeaderMutationPlugin,
}


class DecisionSettings(_Section, frozen=True, kw_only=True):
    """A decision: when it applies, which models it selects, and what it does to the request."""

    name: str
    description: str = ""
    priority: int = 0
    rules: RuleSet = RuleSet()
    modelRefs: list[ModelReference] = []
    plugins: list[Plugin] = []
    mode: Literal["enforce", "observe"] = "enforce"


class CategoryModel(_Section, frozen=True, kw_only=True):
    """The domain classifier: a model's directory as `model_id`, else the shipped one."""

    model_id: str = ""
    threshold: Share = 0.0
    use_cpu: bool = True
    use_modernbert: bool = False
    category_mapping_path: str = ""
    fallback_category: str = "other"


class PiiModel(_Section, frozen=True, kw_only=True):
    """The classifier of personal data: a model's directory as `model_id`, else the shipped one."""

    model_id: str = ""
    threshold: Share = 0.7
    use_cpu: bool = True
    use_modernbert: bool = False
    pii_mapping_path: str = ""


class Classifiers(_Section, frozen=True, kw_only=True):
    """The classifiers of domain and personal data."""

    category_model: CategoryModel = CategoryModel()
    pii_model: PiiModel = PiiModel()
    mcp_category_model: dict[str, Any] = {}


class PromptGuard(_Section, frozen=True, kw_only=True):
    """The guard against attacks, for every decision that does not say otherwise.

    It does not read the messages of `trusted_roles`, where an application alone writes them.
    """

    enabled: bool = False
    model_id: str = ""
    threshold: Share = 0.7
    use_cpu: bool = True
    use_modernbert: bool = False
    use_vllm: bool = False
    jailbreak_mapping_path: str = ""
    mode: GuardMode = "enforce"
    route_to: str | None = None
    on_error: OnError = "pass"
    trusted_roles: list[Literal["system", "developer"]] = []


class EncoderSettings(_Section, frozen=True, kw_only=True):
    """The encoders' process: how long a request waits for it, and whether the exact profile is in it.

    `base_model` is the directory or hub name of all-MiniLM-L6-v2, onto which the exact profile puts its adapters.
    `embeddings_url` is the base address of a server (`http://host:8000/v1`) that gives the embeddings in place of the
    process; the key for it is in the environment variable that `embeddings_key_variable` names.
    """

    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    profile: Literal["fast", "unsure", "exact"] = "fast"
    base_model: str = ""
    embeddings_url: str = ""
    embeddings_model: str = ""
    embeddings_key_variable: str = ""


class CacheSettings(_Section, frozen=True, kw_only=True):
    """The semantic cache; its answers outlive a restart in `directory`, a key of our own, or in Milvus.

    `milvus` may instead be in a file of its own, `backend_config_path`.
    """

    enabled: bool = False
    directory: str = ""
    backend_type: str = "memory"
    milvus: milvus_config.MilvusSettings | None = None
    similarity_threshold: Share | None = None
    max_entries: Count = 1000
    ttl_seconds: Count = 3600
    eviction_policy: Literal["fifo", "lru", "lfu"] = "fifo"
    use_hnsw: bool = False
    hnsw_m: int = 16
    hnsw_ef_construction: int = 200
    embedding_model: str = "bert"
    backend_config_path: str = ""
    max_megabytes: Count = 64


class BertModel(_Section, frozen=True, kw_only=True):
    """The embedding model: its directory, and the threshold of the cache."""

    model_id: str = ""
    threshold: Share = 0.8
    use_cpu: bool = True


class EmbeddingModels(_Section, frozen=True, kw_only=True):
    """Other embedding models; the first directory of `bert_model` and these is used."""

    qwen3_model_path: str = ""
    gemma_model_path: str = ""
    use_cpu: bool = True


class ToolSettings(_Section, frozen=True, kw_only=True):
    """The tools database; without a threshold that of `bert_model` holds."""

    enabled: bool = False
    top_k: Annotated[int, msgspec.Meta(ge=1)] = 3
    similarity_threshold: Share | None = None
    tools_db_path: str = ""
    fallback_to_empty: bool = False


class Conversations(_Section, frozen=True, kw_only=True):
    """When a conversation may change its model."""

    enabled: bool = True
    switch_margin: Share = 0.5
    idle_seconds: Annotated[float, msgspec.Meta(ge=0)] = 1800.0
    max_conversations: Count = 50_000


class BatchClassification(_Section, frozen=True, kw_only=True):
    """The limits of `POST /api/v1/classify/batch`."""

    max_batch_size: Count = 100
    concurrency_threshold: int = 5
    max_concurrency: int = 8
    metrics: dict[str, Any] = {}


class ClassificationApiSettings(_Section, frozen=True, kw_only=True):
    """The settings of the classification API."""

    batch_classification: BatchClassification = BatchClassification()


class SemanticConfig(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    config_source: str = "file"
    mom_registry: dict[str, str] = {}
    strategy: Literal["priority", "confidence"] = "priority"
    auto_model_name: str = "MoM"
    include_config_models_in_list: bool = False
    clear_route_cache: bool = False
    default_model: str = ""
    default_reasoning_effort: str = "medium"
    reasoning_families: dict[str, ReasoningFamily] = {}
    vllm_endpoints: list[VllmEndpoint] = []
    model_config: dict[str, ModelSettings] = {}
    categories: list[Category] = []
    keyword_rules: list[KeywordRule] = []
    embedding_rules: list[EmbeddingRule] = []
    fact_check_rules: list[dict[str, Any]] = []
    user_feedback_rules: list[dict[str, Any]] = []
    preference_rules: list[dict[str, Any]] = []
    decisions: list[DecisionSettings] = []
    default_plugins: list[Plugin] = []  # guards of requests to which no decision applies
    bert_model: BertModel = BertModel()
    classifier: Classifiers = Classifiers()
    prompt_guard: PromptGuard = PromptGuard()
    encoders: EncoderSettings = EncoderSettings()
    semantic_cache: CacheSettings = CacheSettings()
    embedding_models: EmbeddingModels = EmbeddingModels()
    feedback_detector: dict[str, Any] = {}
    hallucination_mitigation: dict[str, Any] = {}
    tools: ToolSettings = ToolSettings()
    response_api: dict[str, Any] = {}
    api: ClassificationApiSettings = ClassificationApiSettings()
    observability: dict[str, Any] = {}
    conversations: Conversations = Conversations()

    @property
    def auto_names(self) -> frozenset[str]:
        """Return the model names that ask the router to choose."""
        return frozenset({"auto", self.auto_model_name})

    @property
    def compares_by_embedding(self) -> bool:
        """Return whether rules or tools are compared with a text by embedding."""
        return bool(self.embedding_rules) or self.tools.enabled

    @property
    def other_files(self) -> dict[str, str]:
        """Return the names of the files that are read beside the configuration's own, by their keys."""
        cache, tools = self.semantic_cache, self.tools
        names = {
            "tools.tools_db_path": tools.tools_db_path if tools.enabled else "",
            "semantic_cache.backend_config_path": cache.backend_config_path
            if cache.backend_type == "milvus"
            else "",
        }
        return {key: name for key, name in names.items() if name}

    def find_model(self, served_name: str) -> ModelSettings | None:
        """Return the settings of a model, or for the name of an adapter those of the model that it changes."""
        references = (ref for decision in self.decisions for ref in decision.modelRefs)
        bases = (ref.model for ref in references if ref.lora_name == served_name)
        names = (served_name, *bases)
        return next((self.model_config[name] for name in names if name in self.model_config), None)


def list_doubts(settings: SemanticConfig) -> Iterator[str]:
    """Yield notes on rules and decisions that never apply, and on decisions that no model is named for."""
    for rule in settings.keyword_rules:
        if not any(rule.keywords):
            yield f"keyword_rules.{rule.name}: it has no keywords, and never holds"
    for decision in settings.decisions:
        path, rules = f"decisions.{decision.name}", decision.rules
        if not rules.conditions:
            yield f"{path}: it has no conditions, and never applies"
        for kind in ("keyword", "embedding"):
            names = {each.signal for each in rules.conditions if each.type == kind}
            if rules.operator == "AND" and len(names) > 1:
                yield (
                    f"{path}: it never applies: one {kind} rule holds for a text, the first or the best, and it asks "
                    f"for {', '.join(sorted(names))}"
                )
        if not (decision.modelRefs or settings.default_model):
            yield f"{path}: no model in modelRefs and no default_model; its requests are refused"


def fill_blanks(tree: Any, info: Any = None) -> Any:
    """Return a tree in which each section or list that stands there without a value is an empty one."""
    info = msgspec.inspect.type_info(SemanticConfig) if info is None else info
    match info, tree:
        case ((msgspec.inspect.StructType() | msgspec.inspect.DictType()), None):
            return {}
        case msgspec.inspect.ListType(), None:
            return []
        case msgspec.inspect.StructType(), dict():
            types = {item.encode_name: item.type for item in info.fields}
            known = {key: fill_blanks(tree[key], types[key]) for key in types.keys() & tree.keys()}
            return {key: known.get(key, value) for key, value in tree.items()}
        case msgspec.inspect.DictType(), dict():
            return {key: fill_blanks(value, info.value_type) for key, value in tree.items()}
        case msgspec.inspect.ListType(), list():
            return [fill_blanks(item, info.item_type) for item in tree]
        case msgspec.inspect.UnionType(), dict():  # of a section that may be absent
            return fill_blanks(tree, info.types[0])
    return tree


def find_file(key: str, name: str, directory: Path | None = None) -> Path:
    """Return the file, or the folder, of a path that stands in a configuration and may be below `directory`.

    Raises ConfigError, which names the key, for a path of no file system or in the home of an unknown user.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except OSError:  # it is not there, or is to be made
        return path if directory is None else directory / path
    except (RuntimeError, ValueError) as error:
        raise errors.ConfigError(f"{key}: expected a path, got {name!r}: {error}") from error
    return path


def list_models(
    settings: SemanticConfig, plugins: Mapping[str, Mapping[str, Any]]
) -> frozenset[str]:
    """Return the names of all models that requests may be sent to by this configuration."""
    references = [reference for decision in settings.decisions for reference in decision.modelRefs]
    guards = [
        settings.prompt_guard,
        *(plugin for by_type in plugins.values() for plugin in by_type.values()),
    ]
    names = {
        settings.default_model,
        *settings.model_config,
        *(reference.served_name for reference in references),
        *(getattr(guard, "route_to", None) or "" for guard in guards),
    }
    return frozenset(names - {""})
