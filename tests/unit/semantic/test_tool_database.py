"""Tools of the database for requests that leave the choice to the model."""

import msgspec
import numpy as np
import pytest

from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.semantic import config_file, router
from dynamo.semantic.classifiers import profile
from dynamo.testing import clock
from semantic_configs import chat

FAST = profile.load_profile()
VECTORS = {
    "weather, rain and sun": (1.0, 0.0, 0.0),
    "forecast for a week": (0.8, 0.6, 0.0),
    "send a message": (0.0, 0.0, 1.0),
    "will it rain": (0.96, 0.28, 0.0),
    "sing a song": (0.0, 1.0, 0.0),
}
CONFIG = """
default_model: general
model_config: {{general: {{}}, plain: {{accepts_tools: false}}}}
bert_model: {{model_id: {directory}}}
tools: {{enabled: true, similarity_threshold: 0.7, tools_db_path: tools.json{more}}}
decisions:
  - name: d
    rules: {{conditions: [{{type: keyword, name: k}}]}}
    modelRefs: [{{model: plain}}, {{model: general}}]
    plugins: [{{type: system_prompt, configuration: {{system_prompt: Be brief.}}}}]
keyword_rules: [{{name: k, keywords: [it, sing]}}]
"""
OWN = {"type": "function", "function": {"name": "own"}}


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


DATABASE = [
    {"tool": tool("mail"), "description": "send a message", "category": "talk", "tags": ["mail"]},
    {"tool": tool("week", description="forecast for a week")},
    {"tool": tool("now", strict=True, big=10**30), "description": "weather, rain and sun"},
]


def make_router(directory, more=""):
    (directory / "config.json").write_text("{}")  # the model's; tests give the vectors
    (directory / "tools.json").write_bytes(msgspec.json.format(msgspec.json.encode(DATABASE)))
    text = CONFIG.format(directory=directory, more=more)
    loaded = config_file.parse(text.encode(), FAST.categories, directory)
    made = router.SemanticRouter(loaded, FAST, clock.VirtualClock())
    made.references.add(answers(*made.references.missing()))
    return made


def answers(*texts):
    return {
        ("embedding", text): encoders.TextLabels(vector=np.array(VECTORS[text], "<f4").tobytes())
        for text in texts
    }


def route(made, body, *texts):
    return made.route(body, {}, classifiers=made.use_answers(answers(*texts)))


def tools_of(outcome):
    return [one["function"]["name"] for one in msgspec.json.decode(outcome.body).get("tools", ())]


def test_the_most_similar_tools_take_the_place_of_the_requests_own(tmp_path):
    body = chat("will it rain", tools=[OWN], tool_choice="auto")

    outcome = route(make_router(tmp_path), body, "will it rain")

    assert tools_of(outcome) == ["now", "week"]
    assert b'"big":1000000000000000000000000000000' in outcome.body
    assert ("x-vsr-selected-tools", "now,week") in outcome.explanation.headers()
    messages = msgspec.json.decode(outcome.body)["messages"]
    assert [message["role"] for message in messages] == ["system", "user"]


def test_tools_that_are_added_need_a_model_that_calls_tools(tmp_path):
    body = chat("will it rain", tool_choice="auto")

    outcome = route(make_router(tmp_path), body, "will it rain")

    assert outcome.explanation.model == "general"
    assert outcome.explanation.struck_out == {"plain": "it calls no tools"}
    assert tools_of(outcome) == ["now", "week"]


def test_the_tools_are_at_most_as_many_as_configured(tmp_path):
    made = make_router(tmp_path, ", top_k: 1")

    assert tools_of(route(made, chat("will it rain", tool_choice="auto"), "will it rain")) == [
        "now"
    ]


@pytest.mark.parametrize("known", [("sing a song",), ()])
@pytest.mark.parametrize(("more", "left"), [("", ["own"]), (", fallback_to_empty: true", [])])
def test_without_a_similar_tool_the_configuration_decides(tmp_path, more, left, known):
    body = chat("sing a song", tools=[OWN], tool_choice="auto", parallel_tool_calls=True)

    outcome = route(make_router(tmp_path, more), body, *known)

    assert tools_of(outcome) == left
    names = msgspec.json.decode(outcome.body).keys() & {"tool_choice", "parallel_tool_calls"}
    assert bool(names) == bool(left)
    assert outcome.explanation.model == ("general" if left else "plain")
    assert bool(outcome.explanation.tools.missing) == (not known)


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "none"}, {"tool_choice": "auto", "model": "general"}]
)
def test_other_requests_keep_their_tools_and_ask_for_no_vector(tmp_path, fields):
    made = make_router(tmp_path)
    body = chat("will it rain", **{"tools": [OWN], **fields})

    assert made.list_inputs(router.request_view.RequestView(body)) == []
    assert tools_of(route(made, body)) == ["own"]


def test_a_request_with_added_tools_is_not_cached(tmp_path):
    text = CONFIG.replace("plugins: [", "plugins: [{{type: semantic-cache}}, ")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tools.json").write_bytes(msgspec.json.encode(DATABASE))
    text = text.format(directory=tmp_path, more="") + "semantic_cache: {enabled: true}"
    loaded = config_file.parse(text.encode(), FAST.categories, tmp_path)
    made = router.SemanticRouter(loaded, FAST, clock.VirtualClock())
    made.references.add(answers(*made.references.missing()))

    added = route(made, chat("will it rain", tool_choice="auto"), "will it rain")
    plain = route(made, chat("will it rain"))

    assert added.cache_key is None
    assert plain.cache_key is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{}", "expected a list of tools in JSON"),
        (b'[{"tool": {"function": {}}}]', "missing required field `name`"),
        (b'[{"tool": {"function": {"name": "a"}}}]', "the tool a has no description"),
        (b"[" + b" " * 2**22 + b"]", "at most 4194304 bytes"),
    ],
)
def test_a_wrong_database_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tools.json").write_bytes(content)
    text = b"tools: {enabled: true, tools_db_path: tools.json}"

    with pytest.raises(errors.ConfigError, match=message):
        config_file.parse(text, FAST.categories, tmp_path)


def test_a_database_without_a_path_is_refused():
    with pytest.raises(errors.ConfigError, match="tools_db_path: expected the file"):
        config_file.parse(b"tools: {enabled: true}", FAST.categories)
