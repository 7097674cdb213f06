"""Many streams at once do not mix."""

import asyncio

import httpx
from deployment import MODEL, chat

from waiting import PATIENT_S

HEROES = ("cat", "dog", "fox", "owl", "bear", "mouse", "rabbit", "wolf")
NATURES = ("brave", "cowardly", "clever", "lazy", "kind", "proud", "small", "old")
PROMPTS = [f"Tell me a story about a {n} {h}" for n in NATURES for h in HEROES]


async def tell(client, url, prompt):
    body = chat(prompt, max_tokens=48, temperature=0)
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


async def stream(client, url, prompt):
    body = chat(prompt, max_tokens=48, temperature=0, stream=True)
    pieces = []
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line[6:]).json()
                pieces += [c["delta"].get("content") or "" for c in chunk["choices"]]
    return "".join(pieces)


async def tell_all(url):
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=PATIENT_S, limits=limits) as client:
        alone = [await tell(client, url, prompt) for prompt in PROMPTS[::8]]
        together = await asyncio.gather(*(stream(client, url, prompt) for prompt in PROMPTS))
    return alone, together


def test_64_concurrent_streams_equal_their_single_runs(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    alone, together = asyncio.run(tell_all(frontend.url))

    assert together[::8] == alone
    assert all(together)
