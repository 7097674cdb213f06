"""`POST /v1/score` and `/v1/rerank` over real HTTP, with a worker that embeds by a script."""

import pytest

from dynamo.frontend.apis import scores

# The script's vector of a text has its length and the code of its first letter: here they are compared as they are.
VECTORS = [[1, 0], [0, 1], [0.6, 0.8], [-1, 0]]


@pytest.fixture
async def rig(bare):
    await bare.start()
    await bare.embedder()
    return bare


def score(text_1, text_2, vectors):
    request = scores.ScoreRequest(model="e", text_1=text_1, text_2=text_2)
    request.check()
    return [entry.score for entry in scores.score_answer(request, vectors)]


def test_one_text_is_compared_with_each_of_a_list():
    assert score("a", ["b", "c", "d"], VECTORS) == [0, 0.6, -1]


def test_two_lists_are_compared_pair_by_pair():
    assert score(["a", "b"], ["c", "d"], VECTORS) == [0.6, 0]


def test_best_documents_come_first():
    request = scores.RerankRequest(model="e", query="a", documents=["b", "c", "d"], top_n=2)
    ranks = scores.rank_answer(request, VECTORS)

    assert [(rank.index, rank.relevance_score) for rank in ranks] == [(1, 0.6), (0, 0)]
    assert [rank.document.text for rank in ranks] == ["c", "b"]


@pytest.mark.parametrize("path", scores.SCORE_PATHS)
async def test_scores_have_the_form_of_vllm(rig, path):
    body = {"model": "e", "text_1": "a", "text_2": ["abc", "d"]}
    answer = (await rig.client.post(path, json=body)).json()

    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_texts_may_have_the_later_names_of_vllm(rig, names):
    texts = {"text_1": ["a", "bcd"], "text_2": ["abc", "d"]}
    renamed = dict(zip(names, texts.values(), strict=True))
    told, same = [
        (await rig.client.post("/v1/score", json={"model": "e", **fields})).json()
        for fields in (texts, renamed)
    ]

    assert (same["data"], same["usage"]) == (told["data"], told["usage"])


@pytest.mark.parametrize("path", scores.RANK_PATHS)
async def test_ranks_have_the_form_of_jina_and_cohere(rig, path):
    documents = ["abc", {"text": "d"}]
    body = {"model": "e", "query": "a", "documents": documents, "return_documents": False}
    bare = (await rig.client.post(path, json=body)).json()
    full = (await rig.client.post(path, json=body | {"return_documents": True, "top_n": 1})).json()

    assert {frozenset(rank) for rank in bare["results"]} == {
        frozenset({"index", "relevance_score"})
    }
    assert {rank["index"] for rank in bare["results"]} == {0, 1}
    assert len(full["results"]) == 1
    assert full["results"][0]["document"]["text"] in ("abc", "d")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/v1/score", {"queries": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        *(
            (path, body | {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens")
            for path, body in (
                ("/v1/score", {"text_1": "a", "text_2": "b"}),
                ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            )
        ),
    ],
)
async def test_invalid_field_is_a_400_with_its_name(rig, path, body, param):
    answer = await rig.client.post(path, json={"model": "e", **body})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/score", {"text_1": "x" * 201, "text_2": "b"}, "text_1", "text_1 number 0 has 201"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "x" * 201]}, "text_2", "text_2 number 1 has"),
        ("/v1/rerank", {"query": "x" * 201, "documents": ["b"]}, "query", "query number 0 has 201"),
        ("/v1/rerank", {"query": "a", "documents": ["x" * 201]}, "documents", "documents number 0"),
    ],
)  # fmt: skip
async def test_text_that_is_too_long_is_named_by_its_place(rig, path, body, param, words):
    error = (await rig.client.post(path, json={"model": "e", **body})).json()["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert words in error["message"]


@pytest.mark.parametrize("path", scores.RANK_PATHS)
async def test_error_of_the_server_itself_has_the_form_of_the_apis_errors(rig, path):
    answer = await rig.client.get(path)

    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_requests_are_counted_by_their_api(rig):
    await rig.client.post("/v1/rerank", json={"model": "e", "query": "a", "documents": ["b"]})
    counts = await rig.metrics()

    assert (
        sum(
            n
            for name, n in counts.items()
            if 'endpoint="rerank"' in name and "requests_total" in name
        )
        == 1
    )
