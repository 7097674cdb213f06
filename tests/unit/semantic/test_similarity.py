"""Rules by embedding: their vectors, their scores and the decisions that rest on them."""

import numpy as np
import pytest

from dynamo.base import errors
from dynamo.cli import semantic as command
from dynamo.protocols import encoders
from dynamo.semantic import config, config_file, decisions, router, similarity
from dynamo.semantic.classifiers import profile
from dynamo.testing import clock
from semantic_configs import chat

FAST = profile.load_profile()
VECTORS = {  # in two dimensions, so that a cosine can be read off
    "repair my car": (1.0, 0.0),
    "fix the motor": (0.8, 0.6),
    "cook rice": (0.0, 1.0),
    "the engine stalls": (0.96, 0.28),
    "boil noodles": (0.28, 0.96),
}
CONFIG = """
default_model: general
model_config: {general: {}, mechanic: {}}
bert_model: {model_id: MODEL}
embedding_rules:
  - name: cars
    threshold: 0.9
    candidates: [repair my car, fix the motor]
    aggregation_method: METHOD
  - {name: food, threshold: 0.5, candidates: [cook rice], aggregation_method: any}
decisions:
  - name: car_decision
    rules: {conditions: [{type: embedding, name: cars}]}
    modelRefs: [{model: mechanic}]
"""


def answers(*texts):
    return {
        ("embedding", text): encoders.TextLabels(vector=np.array(VECTORS[text], "<f4").tobytes())
        for text in texts
    }


def make_router(directory, method="max"):
    """Return a router whose embedding model is a directory without weights; tests give the vectors."""
    (directory / "config.json").write_text("{}")
    text = CONFIG.replace("MODEL", str(directory)).replace("METHOD", method)
    loaded = config_file.parse(text.encode(), FAST.categories)
    assert loaded.uses_encoders
    made = router.SemanticRouter(loaded, FAST, clock.VirtualClock())
    made.references.add(answers(*made.references.missing()))
    return made


def route(made, text):
    classifiers = made.use_answers(answers(text))
    return made.route(chat(text), {}, classifiers=classifiers).explanation


def test_a_similar_text_selects_the_decision_of_its_rule(tmp_path):
    explanation = route(make_router(tmp_path), "the engine stalls")

    assert (explanation.decision, explanation.model) == ("car_decision", "mechanic")
    assert explanation.reasons == ("embedding cars",)
    assert ("x-vsr-matched-embeddings", "cars") in explanation.headers()


def test_the_best_rule_that_reaches_its_threshold_holds(tmp_path):
    explanation = route(make_router(tmp_path), "boil noodles")

    assert explanation.signals.embedding_rule == "food"
    assert explanation.signals.embedding_score == pytest.approx(0.96)
    assert explanation.model == "general"


@pytest.mark.parametrize(
    ("method", "score"), [("max", 1.0), ("any", 1.0), ("mean", (1.0 + 0.8) / 2)]
)
def test_a_rule_aggregates_over_its_candidates(tmp_path, method, score):
    signals = route(make_router(tmp_path, method), "repair my car").signals

    assert (signals.embedding_rule, signals.embedding_score) == ("cars", pytest.approx(score))


def test_the_mean_asks_for_similarity_to_all_candidates(tmp_path):
    """The text is 1.0 and 0.8 similar to the candidates of cars, and the threshold is raised to 0.95."""
    for method, rule in (("max", "cars"), ("mean", None)):
        rules = [
            config.EmbeddingRule(
                name="cars",
                threshold=0.95,
                candidates=["repair my car", "fix the motor"],
                aggregation_method=method,
            )
        ]
        references = make_router(tmp_path).references
        vector = np.array(VECTORS["repair my car"], "<f4")
        assert similarity.SimilarityRules(rules, references).match(vector).rule == rule


def test_without_a_vector_no_rule_holds_and_the_reason_is_said(tmp_path):
    made = make_router(tmp_path)
    silent = made.route(chat("the engine stalls"), {}, classifiers=made.use_answers({}))

    assert silent.explanation.model == "general"
    assert "no encoder answered" in silent.explanation.signals.missing_embedding
    lines = list(command.explain(made, "the engine stalls", "auto", command.LocalEncoders()))
    assert any(line.startswith("embedding rule: none (no embedding") for line in lines)


def test_candidates_of_another_model_are_not_compared(tmp_path):
    made = make_router(tmp_path)
    longer = {("embedding", "text"): encoders.TextLabels(vector=np.ones(3, "<f4").tobytes())}

    signals = made.find_signals("text", made.use_answers(longer))

    assert signals.missing_embedding == "no embeddings of the candidates of cars"


def test_a_request_asks_for_its_vector_together_with_its_labels(tmp_path):
    made = make_router(tmp_path)
    view = router.request_view.RequestView(chat("hello"))

    assert made.list_inputs(view) == [encoders.ClassifierInput("embedding", "hello")]


def test_candidates_are_asked_for_until_they_are_there():
    references = similarity.ReferenceVectors(["cook rice", "cook rice", "repair my car"])

    assert references.missing() == ["cook rice", "repair my car"]
    references.add(answers("cook rice"))
    assert references.missing() == ["repair my car"]


def test_a_decision_by_embedding_is_as_strong_as_the_similarity(tmp_path):
    made = make_router(tmp_path)
    signals = decisions.Signals(embedding_rule="cars", embedding_score=0.93)

    (match,) = made.matches(signals)

    assert match.strength == 0.93


def test_rules_without_a_model_are_noted_and_those_without_candidates_refused():
    text = "bert_model: {model_id: models/x}\nembedding_rules: [{name: a, candidates: [b]}]"
    loaded = config_file.parse(text.encode(), FAST.categories)

    assert not loaded.uses_encoders
    assert loaded.notes == (
        "bert_model.model_id: no directory models/x, and no such model in the hub's cache; "
        "without it nothing is compared by embedding",
    )
    with pytest.raises(errors.ConfigError, match=r"embedding_rules\.a: expected candidates"):
        config_file.parse(b"embedding_rules: [{name: a}]", FAST.categories)
    with pytest.raises(errors.ConfigError, match="no such name: 'b'"):
        config_file.parse(
            b"decisions: [{name: d, rules: {conditions: [{type: embedding, name: b}]}}]",
            FAST.categories,
        )
