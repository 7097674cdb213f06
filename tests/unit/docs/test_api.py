"""docs/api.md lists each parameter of each request, and marks those that are refused."""

import pathlib
import re
import typing

import msgspec
import pytest
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from dynamo.frontend.apis import chat as chat_request
from dynamo.frontend.apis import completions as completion_request
from dynamo.frontend.apis import embeddings, scores, tokenize
from dynamo.frontend.apis.kserve import request as kserve
from dynamo.frontend.apis.messages import request as message_request
from dynamo.frontend.apis.ollama import request as ollama
from dynamo.frontend.apis.responses import request as responses_request
from dynamo.frontend.batches import lines
from dynamo.preprocess import inputs

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "api.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (\w[\w ]*) \| ", re.MULTILINE)
SHARED = "Shared by chat and completions"
REQUEST_BY_TITLE = {
    SHARED: inputs.GenerationInput,
    "POST /v1/chat/completions": chat_request.ChatRequest,
    "POST /v1/completions": completion_request.CompletionRequest,
    "POST /v1/responses": responses_request.ResponsesRequest,
    "POST /v1/messages": message_request.MessageRequest,
    "POST /api/chat": ollama.OllamaChatRequest,
    "POST /api/generate": ollama.OllamaGenerateRequest,
    "POST /api/embed": ollama.OllamaEmbedRequest,
    "POST /v1/embeddings": embeddings.TextEmbeddingRequest,
    "POST /v1/score": scores.ScoreRequest,
    "POST /v1/rerank": scores.RerankRequest,
    "POST /v1/batches": lines.BatchRequest,
    "POST /v2/models/{name}/infer": kserve.InferBody,
    "POST /v2/models/{name}/generate": kserve.GenerateBody,
    "POST /tokenize": tokenize.TokenizeRequest,
    "POST /detokenize": tokenize.DetokenizeRequest,
}


def told(title):
    """Return each parameter of a section of the page, with what the page says about it."""
    heading = title if title == SHARED else f"`{title}`"
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return dict(ROW.findall(section))


def fields(struct, prefix=""):
    """Return for each parameter whether it can only be null; those of a nested object follow a dot."""
    found = {}
    for field in struct.fields:
        name = prefix + field.encode_name
        kinds = getattr(field.type, "types", (field.type,))
        inner = [kind for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
        found[name] = isinstance(field.type, msgspec.inspect.NoneType)
        for kind in inner:
            found |= fields(kind, name + ".")
    return found


@pytest.mark.parametrize("title", REQUEST_BY_TITLE)
def test_each_parameter_is_listed_and_null_only_ones_are_refused(title):
    request = REQUEST_BY_TITLE[title]
    expected = fields(msgspec.inspect.type_info(request))
    listed = told(title)
    if title != SHARED and issubclass(request, inputs.GenerationInput):
        listed |= told(SHARED)
    elif title != SHARED and issubclass(request, inputs.EngineFields):
        of_engines = fields(msgspec.inspect.type_info(inputs.EngineFields))
        listed |= {name: told(SHARED)[name] for name in of_engines}

    assert listed.keys() == expected.keys()
    assert set(listed.values()) <= {"honoured", "no effect", "refused"}
    for name, is_null in expected.items():
        if is_null:
            assert listed[name] == "refused", name


# The parameters of the official clients, by the section of the page that describes them.
CLIENT_PARAMS = {
    "POST /v1/chat/completions": chat_params.CompletionCreateParamsStreaming,
    "POST /v1/completions": completion_params.CompletionCreateParamsStreaming,
    "POST /v1/responses": response_params.ResponseCreateParamsStreaming,
    "POST /v1/messages": message_params.MessageCreateParamsStreaming,
}


@pytest.mark.parametrize("title", CLIENT_PARAMS)
def test_each_parameter_of_the_official_client_has_a_row(title):
    sent = set(typing.get_type_hints(CLIENT_PARAMS[title]))
    shared = told(SHARED) if issubclass(REQUEST_BY_TITLE[title], inputs.EngineFields) else {}

    assert len(sent) > 10
    assert sent <= told(title).keys() | shared.keys()
