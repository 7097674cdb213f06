"""`POST /v1/completions`."""

from collections.abc import Sequence

from dynamo.frontend import pipeline
from dynamo.frontend.apis import openai_errors
from dynamo.frontend.apis.completions import answer, request
from dynamo.frontend.apis.operation import GENERATION_ERRORS, ApiContext, Operation
from dynamo.frontend.delivery import streaming
from dynamo.preprocess import preprocessor


async def prepare(
    preparer: preprocessor.Preprocessor, completion: request.CompletionRequest, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """Prepare each prompt of the request. Raises RequestError."""
    return await preparer.prepare_prompts(
        completion,
        request_id,
        prompts=completion.prompts,
        suffix=completion.suffix,
        param=completion.prompt_param,
    )


API = pipeline.GenerationApi(
    endpoint="completions",
    decode=request.decode,
    prepare=prepare,
    make_formatter=answer.CompletionFormatter,
    stream=streaming.StreamDelivery,
    dialect=openai_errors,
)
_TEXT = {"type": "string"}
_IDS = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "minItems": 1, "items": _TEXT},
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    return (
        Operation(
            method="POST",
            path="/v1/completions",
            handler=context.generate(API),
            summary="Continue a text",
            tag="OpenAI",
            request=request.CompletionRequest,
            request_details={"prompt": _PROMPT},
            answer=answer.Completion,
            events=answer.Completion,
            ends_with_done=True,
            errors=GENERATION_ERRORS,
            example={"prompt": "Once upon a time", "max_tokens": 60},
        ),
    )
