"""`POST /v1/score` and `/v1/rerank`: how near texts are to each other, by the vectors of an embedding model.

A score is the cosine of two vectors, from -1 to 1; the vectors have length 1, so it is their product. Requests and
answers of scores have the form of vLLM's, those of ranks that of Jina's and Cohere's, and have their paths as well.
Each text is embedded once, on the path of requests for embeddings.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend.apis import embeddings, error_dialects, openapi
from dynamo.frontend.apis.operation import GENERATION_ERRORS, Operation, RequestHandlers
from dynamo.runtime.http import json_body

RANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
MAX_PAIRS = 1024  # so that their products never delay other answers for long
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


_Texts = str | list[str]
_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts: one text with each of a list, or two lists of one length, pair by pair."""

    model: str
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None  # vLLM's later names of the same
    data_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    user: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = None  # other lengths are refused

    dimensions = None
    encoding_format = None

    @property
    def sides(self) -> tuple[str, str]:
        """The names of the two fields with the texts."""
        return next((pair for pair in _PAIRS if pair == self._given_fields), _PAIRS[0])

    @property
    def _given_fields(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for pair in _PAIRS for name in pair)
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def first_texts(self) -> list[str]:
        return _list_texts(getattr(self, self.sides[0]))

    @property
    def second_texts(self) -> list[str]:
        return _list_texts(getattr(self, self.sides[1]))

    @property
    def prompts(self) -> list[str]:
        """The texts of both sides, the first side first."""
        return [*self.first_texts, *self.second_texts]

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the field that has the prompt of this number, and its number there."""
        (first, second), num_first = self.sides, len(self.first_texts)
        return (first, number) if number < num_first else (second, number - num_first)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The numbers of the two prompts of each score."""
        num_first = len(self.first_texts)
        return [
            (number if num_first > 1 else 0, num_first + number)
            for number in range(len(self.second_texts))
        ]

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        first, second = self.sides
        if self._given_fields != self.sides:
            pairs, fields = map(" and ".join, _PAIRS), ", ".join(self._given_fields)
            raise embeddings.wrong_input(first, ", or ".join(pairs), fields or "none")
        embeddings.check_prompts(self.first_texts, first)
        embeddings.check_prompts(self.second_texts, second)
        num_first, num_second = len(self.first_texts), len(self.second_texts)
        if not num_first or (num_first > 1 and num_first != num_second):
            expected = f"one text, or as many as in {second}, {num_second}"
            raise embeddings.wrong_input(first, expected, str(num_first))
        if not 0 < num_second <= MAX_PAIRS:
            raise embeddings.wrong_input(second, f"1 to {MAX_PAIRS} texts", str(num_second))


class RankedText(msgspec.Struct, frozen=True, kw_only=True):
    """A document, in an object."""

    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question, and the documents to rank by how near they are to it."""

    model: str
    query: str
    documents: list[str | RankedText]
    top_n: Count | None = None  # of the answer; None or 0: all
    return_documents: bool | None = None  # in the answer; None: yes
    max_tokens_per_doc: Count | None = None
    user: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = None  # other lengths are refused

    dimensions = None
    encoding_format = None

    @property
    def texts(self) -> list[str]:
        return [text if isinstance(text, str) else text.text for text in self.documents]

    @property
    def prompts(self) -> list[str]:
        """The question, and the documents."""
        return [self.query, *self.texts]

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the field that has the prompt of this number, and its number there."""
        return ("documents", number - 1) if number else ("query", 0)

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        embeddings.check_prompts([self.query], "query")
        embeddings.check_prompts(self.texts, "documents")
        if not 0 < len(self.documents) <= MAX_PAIRS:
            expected, got = f"1 to {MAX_PAIRS} documents", str(len(self.documents))
            raise embeddings.wrong_input("documents", expected, got)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The cosine of one pair, from -1 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all texts; none are generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """All scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Rank(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document: its place in the request, and its cosine with the question."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RankList(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[Rank]


def score_answer(request: ScoreRequest, vectors: Sequence[Sequence[float]]) -> list[Score]:
    """Return the scores of all pairs, from the vectors of the request's prompts."""
    return [
        Score(index=index, object="score", score=_cosine(vectors[first], vectors[second]))
        for index, (first, second) in enumerate(request.pairs)
    ]


def rank_answer(request: RerankRequest, vectors: Sequence[Sequence[float]]) -> list[Rank]:
    """Return the documents that the answer names, best first; of equal ones, the first in the request."""
    query, *documents = vectors
    scores = [_cosine(query, document) for document in documents]
    best = sorted(range(len(scores)), key=lambda number: -scores[number])
    texts = None if request.return_documents is False else request.texts
    return [
        Rank(
            index=number,
            relevance_score=scores[number],
            document=None if texts is None else RankedText(text=texts[number]),
        )
        for number in best[: request.top_n or None]
    ]


def _list_texts(value: _Texts | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    product: float = sum(map(operator.mul, first, second))
    return max(-1.0, min(1.0, product))  # rounding may exceed it


_DOCUMENT = openapi.make_object(("text",), text=openapi.SOME_TEXT)
_SIDES = (("text_1", "text_2"), ("queries", "documents"))
_TWO_SIDES = {
    "anyOf": [
        openapi.make_object(
            sides,
            **dict.fromkeys(sides, openapi.PROMPT_TEXTS),
            **dict.fromkeys(null_sides, openapi.NULL),
        )
        for sides, null_sides in (_SIDES, _SIDES[::-1])
    ]
}
_DETAILS: Mapping[type, Mapping[str, Any]] = {
    ScoreRequest: {},
    RerankRequest: {
        "query": openapi.SOME_TEXT,
        "documents": openapi.list_of({"anyOf": [openapi.SOME_TEXT, _DOCUMENT]}),
    },
}


def operations(
    handlers: RequestHandlers, pipeline: embeddings.EmbeddingPipeline
) -> Sequence[Operation]:
    clock = clocks.SystemClock()

    def usage(plan: embeddings.EmbeddingPlan) -> ScoreUsage:
        return ScoreUsage(prompt_tokens=plan.num_tokens, total_tokens=plan.num_tokens)

    def make_scores(plan: embeddings.EmbeddingPlan, vectors: Sequence[Any]) -> dict[str, Any]:
        assert isinstance(plan.request, ScoreRequest)
        answer = ScoreList(
            id=f"score-{plan.request_id}",
            object="list",
            created=int(clock.wall()),
            model=plan.model,
            data=score_answer(plan.request, vectors),
            usage=usage(plan),
        )
        return msgspec.structs.asdict(answer)

    def make_ranks(plan: embeddings.EmbeddingPlan, vectors: Sequence[Any]) -> dict[str, Any]:
        assert isinstance(plan.request, RerankRequest)
        results = rank_answer(plan.request, vectors)
        answer = RankList(
            id=f"rerank-{plan.request_id}", model=plan.model, usage=usage(plan), results=results
        )
        return msgspec.structs.asdict(answer)

    def describe(
        path: str,
        request: type[ScoreRequest | RerankRequest],
        make_answer: Any,
        **fields: Any,
    ) -> Operation:
        api = embeddings.EmbeddingApi(
            decode=json_body.RequestDecoder(request).decode,
            make_vector=lambda _, vector: vector,
            make_answer=make_answer,
            dialect=error_dialects.OPENAI,
            endpoint="score" if request is ScoreRequest else "rerank",
        )
        return Operation(
            method="POST",
            path=path,
            handler=handlers.accepted(functools.partial(pipeline.handle, api=api)),
            tag="Texts compared",
            request=request,
            request_details=_DETAILS[request],
            body_factor=4,
            errors=GENERATION_ERRORS,
            **fields,
        )

    scores = [
        describe(
            path,
            ScoreRequest,
            make_scores,
            summary="How near texts are to each other",
            request_rules=(_TWO_SIDES,),
            answer=ScoreList,
            example={"text_1": "Where was the cat?", "text_2": ["A cat sat.", "It rains."]},
        )
        for path in SCORE_PATHS
    ]
    ranks = [
        describe(
            path,
            RerankRequest,
            make_ranks,
            summary="Documents, ranked by how near they are to a question",
            answer=RankList,
            example={"query": "Where was the cat?", "documents": ["A cat sat.", "It rains."]},
        )
        for path in RANK_PATHS
    ]
    return (*scores, *ranks)
