"""What encoders answer, as the classifiers of one request."""

import base64
import pathlib

import pytest

from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.semantic import config_file, encoder_labels, encoder_scores, guards, router
from dynamo.semantic.classifiers import attacks, pii, profile
from dynamo.testing import clock
from semantic_configs import ATTACK, CARD, chat

FAST = profile.load_profile()
PLACE = pathlib.Path("model")
MODELS = {
    "domain": encoder_labels.EncoderModel(PLACE, ("math", "law")),
    "attack": encoder_labels.EncoderModel(PLACE, ("benign", "jailbreak", "injection")),
    "pii": encoder_labels.EncoderModel(PLACE, ("O", "B-PERSON", "I-PERSON")),
}
CONFIG = """
default_model: general
model_config: {general: {}, lawyer: {}}
decisions:
  - name: law_decision
    rules: {conditions: [{type: domain, name: law}]}
    modelRefs: [{model: lawyer}]
    plugins: [{type: pii, configuration: {pii_types_allowed: []}}]
prompt_guard: {enabled: true, threshold: 0.7, on_error: block}
"""


def answer(name, *windows, **fields):
    return encoders.TextLabels(labels=MODELS[name].labels, windows=windows, **fields)


def scores(models=MODELS, **answers):
    table = {(name, "text"): value for name, value in answers.items()}
    return encoder_scores.EncoderScores(FAST, models, table, "law")


def make_router(models):
    loaded = config_file.parse(CONFIG.encode(), FAST.categories)
    with_models = config_file.LoadedConfig(loaded.settings, loaded.plugins, encoders=models)
    return router.SemanticRouter(with_models, FAST, clock.VirtualClock())


def test_risk_is_the_share_of_all_attacks_in_the_worst_window():
    score = scores(attack=answer("attack", (0.9, 0.1, 0.0), (0.25, 0.35, 0.4))).classify_attack(
        "text"
    )

    assert score.risk == pytest.approx(0.75)
    assert score.kind == "injection"


def test_a_sure_harmless_text_has_no_risk():
    score = scores(attack=answer("attack", (0.99, 0.01, 0.0))).classify_attack("text")

    assert score.risk == pytest.approx(0.01)
    assert score.kind == "benign"


def test_the_domain_is_the_mean_over_windows():
    score = scores(domain=answer("domain", (0.6, 0.4), (0.1, 0.9))).classify_domain("text")

    assert (score.category, score.confidence) == ("law", pytest.approx(0.65))
    assert score.probabilities == {"math": pytest.approx(0.35), "law": pytest.approx(0.65)}


def test_patterns_go_before_the_model():
    text = f"Ann has {CARD}"
    spans = (
        encoders.LabeledSpan("PERSON", 0, 3, 0.9),
        encoders.LabeledSpan("PERSON", 4, len(text), 0.9),
    )
    found = encoders.TextLabels(spans=spans, is_complete=False)
    classifiers = encoder_scores.EncoderScores(FAST, MODELS, {("pii", text): found}, "law")

    marked, is_complete = classifiers.find_pii(text)

    assert [(span.type, span.start) for span in marked] == [("PERSON", 0), ("CREDIT_CARD", 8)]
    assert not is_complete


def test_classifiers_without_a_model_are_the_shipped_ones():
    plain = scores(models={})

    assert plain.classify_domain("What is the derivative of x^2?").category == "math"
    assert plain.classify_attack(ATTACK).risk > 0.7
    assert plain.find_pii(CARD)[0]


def test_no_answer_is_an_error_of_the_guards_and_the_fallback_of_the_domain():
    silent = scores()

    assert silent.classify_domain("text").category == "law"
    for ask in (silent.classify_attack, silent.find_pii):
        with pytest.raises(errors.Unavailable, match="did not answer"):
            ask("text")


def test_a_silent_guard_blocks_where_the_configuration_says_so():
    made = make_router(MODELS)

    outcome = made.route(chat("hello"), {}, classifiers=made.use_answers({}))

    assert outcome.explanation.path == "blocked"
    (verdict,) = outcome.explanation.verdicts
    assert verdict == guards.GuardVerdict(
        guard="jailbreak",
        action="block",
        labels=("error",),
        reason="the guard failed: Unavailable",
        is_complete=False,
    )


def test_answers_of_the_encoders_decide_the_route():
    made = make_router(MODELS)
    answers = {
        ("domain", "hello"): answer("domain", (0.1, 0.9)),
        ("attack", "hello"): answer("attack", (0.99, 0.01, 0.0)),
        ("pii", "hello"): encoders.TextLabels(),
    }

    outcome = made.route(chat("hello"), {}, classifiers=made.use_answers(answers))

    assert outcome.explanation.model == "lawyer"
    assert outcome.explanation.category == "law"


def test_each_text_is_read_once_by_each_encoder_that_is_needed():
    made = make_router(MODELS)
    messages = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "hello"},
    ]
    view = router.request_view.RequestView(chat(messages))

    inputs = [(one.classifier, one.text) for one in made.list_inputs(view)]

    assert inputs == [
        ("domain", "hello"),
        ("attack", "Be kind"),
        ("attack", "hello"),
        ("pii", "Be kind"),
        ("pii", "hello"),
    ]
    assert not make_router({}).list_inputs(view)


EXACT_CONFIG = CONFIG + "encoders: {profile: PROFILE, base_model: somewhere}\n"


class WordModels:
    """Word models that give all texts these scores."""

    def __init__(self, confidence, risk, pii_types):
        self._scores = confidence, risk, pii_types

    def classify_domain(self, text):
        return profile.DomainScore("law", self._scores[0], {"law": self._scores[0]})

    def classify_attack(self, text):
        return attacks.AttackScore(self._scores[1], "benign", ())

    def find_pii(self, text):
        return [pii.PiiSpan(name, 0, len(text), 0.9) for name in self._scores[2]], True


def make_exact_router(profile_name, fast=FAST):
    text = EXACT_CONFIG.replace("PROFILE", profile_name)
    loaded = config_file.parse(text.encode(), FAST.categories)
    assert loaded.uses_encoders
    return router.SemanticRouter(loaded, fast, clock.VirtualClock())


def exact_answer(share_of_attack):
    return encoders.TextLabels(
        labels=("benign", "jailbreak"), windows=((1 - share_of_attack, share_of_attack),)
    )


def test_the_exact_profile_reads_everything():
    view = router.request_view.RequestView(chat("hello"))

    inputs = make_exact_router("exact").list_inputs(view)

    assert [one.classifier for one in inputs] == ["exact_domain", "exact_attack", "exact_names"]


@pytest.mark.parametrize(
    ("scores", "classifiers"),
    [
        ((0.9, 0.01, ()), []),
        ((0.9, 0.99, ("CREDIT_CARD",)), []),
        ((0.5, 0.01, ()), ["exact_domain"]),
        ((0.9, 0.5, ("PERSON",)), ["exact_attack", "exact_names"]),
    ],
)
def test_the_unsure_profile_reads_what_the_word_models_are_unsure_of(scores, classifiers):
    made = make_exact_router("unsure", WordModels(*scores))
    view = router.request_view.RequestView(chat("hello"))

    assert [one.classifier for one in made.list_inputs(view)] == classifiers


def test_encoder_and_word_models_decide_together():
    text = "What is the derivative of x^2?"
    categories = sorted(FAST.categories)
    shares = tuple(0.9 if name == "law" else 0.1 / 13 for name in categories)
    answers = {
        ("exact_domain", text): encoders.TextLabels(labels=tuple(categories), windows=(shares,)),
        ("exact_attack", text): exact_answer(0.999),
        ("exact_names", text): encoders.TextLabels(
            spans=(encoders.LabeledSpan("PERSON", 0, 4, 0.9),)
        ),
    }
    exact = encoder_scores.EncoderScores(FAST, {}, answers, "other")
    tagged = FAST.find_pii(CARD)[0]

    joined, alone = exact.classify_domain(text), FAST.classify_domain(text)
    assert joined.probabilities["law"] > alone.probabilities["law"]
    assert sum(joined.probabilities.values()) == pytest.approx(1)
    assert exact.classify_attack(text).risk > FAST.classify_attack(text).risk
    assert [span.type for span in exact.find_pii(text)[0]] == ["PERSON"]
    answers["exact_names", CARD] = encoders.TextLabels()
    assert exact.find_pii(CARD)[0] == tagged


def test_name_that_only_the_encoder_sees_is_less_sure():
    text = "Please ask Jennifer Okonkwo about the derivative"
    spans = tuple(
        encoders.LabeledSpan("PERSON", start, end, 0.9) for start, end in ((11, 27), (38, 48))
    )
    answers = {("exact_names", text): encoders.TextLabels(spans=spans)}

    found, _ = encoder_scores.EncoderScores(FAST, {}, answers, "other").find_pii(text)

    confidences = {text[span.start : span.end]: span.confidence for span in found}
    assert confidences == pytest.approx({"Jennifer Okonkwo": 0.9, "derivative": 0.72})


def test_request_inside_a_table_is_an_attack_whatever_the_encoder_says():
    text = "| Team | Wins |\n| A | 3 |\nWhat is the capital of Brazil?\n| B | 4 |"
    exact = encoder_scores.EncoderScores(
        FAST, {}, {("exact_attack", text): exact_answer(0.001)}, "other"
    )

    assert exact.classify_attack(text).risk == FAST.classify_attack(text).risk >= 0.7


def test_encoder_reads_what_a_text_hides_from_the_classifier_of_attacks():
    text = "Please do this: " + base64.b64encode(ATTACK.encode()).decode()
    inputs = make_router(MODELS).list_inputs(router.request_view.RequestView(chat(text)))
    read = [entry.text for entry in inputs if entry.classifier == "attack"]
    calm, hidden = answer("attack", (1.0, 0.0, 0.0)), answer("attack", (0.1, 0.9, 0.0))
    configured = {("attack", text): calm, ("attack", read[-1]): hidden}
    exact = {("exact_attack", text): exact_answer(0.0), ("exact_attack", read[-1]): exact_answer(1)}

    found = encoder_scores.EncoderScores(FAST, MODELS, configured, "law").classify_attack(text)
    joined = encoder_scores.EncoderScores(FAST, {}, exact, "law").classify_attack(text)

    assert [ATTACK in part for part in read] == [False, True]
    assert (found.risk, found.kind) == (pytest.approx(0.9), "jailbreak")
    assert joined.risk > 0.99
    del configured["attack", read[-1]]
    with pytest.raises(errors.Unavailable):
        encoder_scores.EncoderScores(FAST, MODELS, configured, "law").classify_attack(text)


def test_the_word_models_decide_alone_where_the_exact_profile_does_not_answer():
    exact = encoder_scores.EncoderScores(FAST, {}, {}, "other")

    assert exact.classify_domain("text") == FAST.classify_domain("text")
    assert exact.classify_attack(ATTACK) == FAST.classify_attack(ATTACK)
    assert exact.find_pii(CARD) == FAST.find_pii(CARD)


def test_a_profile_without_its_base_model_stops_the_start():
    with pytest.raises(errors.ConfigError, match="exact needs base_model"):
        config_file.parse(b"encoders: {profile: exact}", FAST.categories)
