"""A frontend and a scripted worker in one process: real HTTP on loopback, everything else in memory."""

import asyncio
import hashlib
import json

import httpx
import msgspec

from dynamo.frontend import config, service
from dynamo.protocols import blocks, encoders, generate, instances, model_card
from dynamo.runtime import component
from waiting import PATIENT_S, until

EOS = 256
NAME = instances.EndpointName("dynamo", "backend", "generate")
_decode_embed = msgspec.msgpack.Decoder(encoders.EmbeddingRequest).decode
_decode = msgspec.msgpack.Decoder(generate.Request).decode


def card_of(folder, name="m", **fields):
    """The card that a worker with this model would write."""
    files = {
        path.name: model_card.ModelFile(
            path=str(path),
            checksum="sha256:" + hashlib.sha256(path.read_bytes()).hexdigest(),
            size=path.stat().st_size,
        )
        for path in sorted(folder.iterdir())
    }
    defaults = {"context_length": 200, "kv_cache_block_size": 16, "created": 1700000000}
    return model_card.ModelCard(
        display_name=name, source_path=str(folder), **defaults | {"files": files} | fields
    )


def ids(text):
    return tuple(text.encode())


def outputs(text, reason="length", index=0):
    """One output for each byte of an ASCII text, the last with the reason."""
    ended = generate.FinishReason(reason) if reason else None
    made = [generate.Output((one,), index=index) for one in ids(text)]
    if ended is generate.FinishReason.EOS:
        return [*made, generate.Output((EOS,), ended, index=index)]
    if ended is not None:
        made[-1] = generate.Output(made[-1].token_ids, ended, index=index)
    return made


SAID = (
    "<think>hm, so</think>I look."
    '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    '<tool_call>{"name": "see", "arguments": {}}</tool_call>'
)


async def add_parsed_worker(rig):
    """Let `rig.two` serve a model "p" that thinks, speaks and calls two tools, as `SAID`."""
    facts = model_card.ModelRuntimeConfig(tool_call_parser="hermes", reasoning_parser="basic")
    rig.two = await rig.worker("p", runtime_config=facts, context_length=4000)
    rig.two.script = outputs(SAID, "eos")


class Worker:
    """Answers by a script: a list of outputs for each request, or a function of the call."""

    def __init__(self, runtime, card, name=NAME):
        self.runtime = runtime
        self.card = card
        self.name = name
        self.calls = []
        self.requests = []
        self.num_cancelled = 0
        self.cancelled_choices = []
        self.script = outputs("hello")

    async def join(self):
        self.instance = await self.runtime.register(self.name, self.handle, self.card.record_for)

    def handle(self, call):
        self.calls.append(call)
        self.requests.append(_decode(call.body))
        call.on_cancel(self._cancelled)
        call.on_signal(self.cancelled_choices.append)
        if callable(self.script):
            self.script(call, self.requests[-1])
            return
        for output in self.script:
            call.send(output)
        if self.script[-1].finish_reason is not None:
            call.finish()

    def _cancelled(self):
        self.num_cancelled += 1

    @property
    def prompts(self):
        """What came, as text."""
        return [bytes(blocks.unpack(one.token_ids)).decode() for one in self.requests]


class Embedder(Worker):
    """Gives each text the vector [number of tokens, first token, 0, 0], each in a reply of its own, last one first."""

    def handle(self, call):
        self.calls.append(call)
        request = _decode_embed(call.body)
        self.requests.append(request)
        call.on_cancel(self._cancelled)
        if callable(self.script):
            self.script(call, request)
            return
        for number, token_ids in reversed(list(enumerate(request.inputs))):
            vector = [blocks.count(token_ids), blocks.unpack(token_ids)[0], 0, 0]
            packed = encoders.pack(vector[: request.dimensions])
            call.reply(encoders.Vectors((number,), packed))
        call.finish()

    @property
    def prompts(self):
        """What came, as text."""
        return [
            bytes(blocks.unpack(one)).decode() for asked in self.requests for one in asked.inputs
        ]


EMBEDS = {
    "model_type": (model_card.ModelType.EMBEDDINGS,),
    "embedding": model_card.EmbeddingFacts(dimensions=4),
}


class Rig:
    """A frontend, and workers that come and go."""

    def __init__(self, model_dir, stack):
        self.model_dir = model_dir
        self._stack = stack
        self.cluster = component.MemoryCluster()

    async def start(self, routing=None, prefill=None, **settings):
        defaults = {"http_port": 0, "discovery_backend": "mem", "request_plane": "memory",
                    "event_plane": "memory"}  # fmt: skip
        self.settings = config.FrontendConfig(**defaults | settings)
        runtime = await component.DistributedRuntime.open(
            self.settings, self.cluster, item_type=generate.Output
        )
        await self._stack.enter_async_context(runtime)
        self.frontend = await self._stack.enter_async_context(
            service.Frontend(self.settings, runtime, routing, prefill)
        )
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self.frontend.url, timeout=PATIENT_S)
        )

    async def worker(self, name="m", *, kind=Worker, **fields):
        """A new worker, which the frontend knows."""
        made = await self.register(kind, name, NAME, **fields)
        await self.until(lambda: made.instance in self.instances)
        return made

    async def register(self, kind, name, endpoint, **fields):
        """A new worker."""
        runtime = await component.DistributedRuntime.in_memory(
            self.cluster, item_type=generate.Output
        )
        await self._stack.enter_async_context(runtime)
        made = kind(runtime, card_of(self.model_dir, name, **fields), endpoint)
        await made.join()
        return made

    @property
    def instances(self):
        return [one for model in self.frontend.models.ready for one in model.instances]

    until = staticmethod(until)

    async def chat(self, text="hi", **fields):
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt="hi", **fields):
        return await self.client.post(
            "/v1/completions", json={"model": "m", "prompt": prompt, **fields}
        )

    def start_task(self, work):
        """Run it beside the test, and not longer."""
        task = asyncio.ensure_future(work)
        self._stack.callback(task.cancel)
        return task

    async def embedder(self, name="e", **fields):
        """A new worker that embeds, at an endpoint of its own."""
        return await self.worker(name, kind=Embedder, **EMBEDS | fields)

    async def embed(self, *inputs, **fields):
        body = {"model": "e", "input": list(inputs), **fields}
        return await self.client.post("/v1/embeddings", json=body)

    async def metrics(self):
        """Name and labels → value."""
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def events(text):
    """The data of each event, decoded; [DONE] as it is."""
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]
