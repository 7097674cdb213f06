"""Answer a question by passages of your own text files: embed, search, rank, ask. Needs nothing but httpx.

    python examples/rag/rag.py --embed-model vectors --chat-model storyteller "Where do cats sleep?" notes/*.txt

A passage is a paragraph. Their vectors are computed once (`/v1/embeddings`), the nearest to the question are ranked
(`/v1/rerank`), and the best ones stand before the question in the prompt (`/v1/chat/completions`).
"""

import argparse
import pathlib
import sys

import httpx

TIMEOUT_S = 120


def ask(url: str, path: str, body: dict) -> dict:
    """Return the answer of the API, or end the program with its error."""
    try:
        answer = httpx.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)
    except httpx.ConnectError as error:
        sys.exit(
            f"no frontend answers at {url} ({error}): start one, or name its address with --url"
        )
    if answer.is_error:
        sys.exit(f"{path}: {answer.json()['error']['message']}")
    return answer.json()


def embed(url: str, model: str, texts: list[str]) -> list[list[float]]:
    rows = ask(url, "/v1/embeddings", {"model": model, "input": texts})["data"]
    return [row["embedding"] for row in rows]


def nearest(question: list[float], passages: list[list[float]], count: int) -> list[int]:
    """Return the numbers of the passages whose vectors are nearest; vectors have length 1."""
    scores = [sum(map(float.__mul__, question, vector)) for vector in passages]
    return sorted(range(len(scores)), key=lambda number: -scores[number])[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--embed-model", required=True)
    parser.add_argument("--chat-model", required=True)
    parser.add_argument("--passages", type=int, default=2)
    options = parser.parse_args()
    text = "\n\n".join(path.read_text("utf-8") for path in options.files)
    passages = [part.strip() for part in text.split("\n\n") if part.strip()]
    vector, *vectors = embed(options.url, options.embed_model, [options.question, *passages])
    found = [passages[number] for number in nearest(vector, vectors, 4 * options.passages)]
    body = {"model": options.embed_model, "query": options.question, "documents": found}
    ranks = ask(options.url, "/v1/rerank", body | {"top_n": options.passages})["results"]
    for rank in ranks:
        print(f"[{rank['relevance_score']:.3f}] {rank['document']['text']}")
    context = "\n\n".join(rank["document"]["text"] for rank in ranks)
    messages = [
        {"role": "system", "content": f"Answer by these passages alone:\n\n{context}"},
        {"role": "user", "content": options.question},
    ]
    body = {"model": options.chat_model, "messages": messages, "max_tokens": 200}
    answer = ask(options.url, "/v1/chat/completions", body)
    print(answer["choices"][0]["message"]["content"])
    print(f"({answer['usage']['prompt_tokens']} tokens in the prompt)", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except (OSError, httpx.HTTPError) as error:
        sys.exit(f"rag.py: {error}")
