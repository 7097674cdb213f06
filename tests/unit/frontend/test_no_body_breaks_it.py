"""Every body that is sent to an API is answered or refused with a reason, never with a 5xx."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
KINDS = ["text", "input_text", "output_text", "message", "tool_use", "tool_result", "thinking",
         "reasoning", "function_call", "function_call_output", "image", "input_image", "image_url"]  # fmt: skip
part = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        key: st.text(max_size=5) | json_values
        for key in ("text", "id", "name", "input", "tool_use_id", "call_id", "arguments", "output", "summary",
                    "thinking", "source", "image_url")
    },
)  # fmt: skip
content = st.text(max_size=5) | st.lists(part, max_size=3) | json_values
turn = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": content},
    optional={"images": json_values},
)
talk = st.lists(turn | part, max_size=4) | json_values
CASES = {
    "/v1/messages": ({"model": "m", "max_tokens": 5}, "messages", ["system", "stop_sequences", "thinking", "stream"]),
    "/v1/messages/count_tokens": ({"model": "m"}, "messages", ["system", "tools"]),
    "/v1/responses": ({"model": "m"}, "input", ["instructions", "stream", "metadata", "text", "previous_response_id"]),
    "/v1/responses/input_tokens": ({"model": "m"}, "input", ["instructions", "tools"]),
    "/v1/embeddings": ({"model": "e"}, "input", ["dimensions", "encoding_format", "user"]),
    "/v2/models/m/infer": ({}, "inputs", ["parameters", "outputs", "id"]),
    "/v2/models/m/generate": ({}, "text_input", ["parameters", "stream", "id"]),
    "/v1/chat/completions": ({"model": "m", "max_tokens": 5}, "messages", ["stream", "tools"]),
    "/api/chat": ({"model": "m", "stream": False}, "messages", ["format", "think"]),
    "/api/generate": ({"model": "m", "stream": False}, "images", ["prompt", "system", "raw"]),
    "/tokenize": ({}, "messages", ["prompt", "tools", "model"]),
    "/detokenize": ({}, "tokens", ["model"]),
}  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(CASES)), talk, st.data())
async def test_no_body_is_answered_by_a_5xx(rig, path, said, data):
    if not any(model.name == "e" for model in rig.frontend.models.ready):
        await rig.embedder()
    fixed, key, names = CASES[path]
    fields = data.draw(st.dictionaries(st.sampled_from(names), json_values, max_size=2))
    body = msgspec.json.encode({**fixed, key: said, **fields})
    headers = {"content-type": "application/json"}
    answer = await rig.client.post(path, content=body, headers=headers)

    assert answer.status_code < 500
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("depth", [100, 900, 990, 2000])
async def test_deep_nesting_is_answered_or_refused(rig, depth):
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    responded = await rig.client.post("/v1/responses", json={"model": "m", "input": [call]})
    block = b'{"type":"tool_use","id":"t","name":"f","input":%b}' % arguments.encode()
    body = (
        b'{"model":"m","max_tokens":5,"messages":[{"role":"assistant","content":[%b]},'
        b'{"role":"user","content":"x"}]}' % block
    )
    headers = {"content-type": "application/json"}
    answered = await rig.client.post("/v1/messages", content=body, headers=headers)

    assert responded.status_code in (200, 400)
    assert answered.status_code in (200, 400)
