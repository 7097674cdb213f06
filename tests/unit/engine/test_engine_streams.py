"""What the engines of other projects have in common, over a library of the test."""

from pathlib import Path

from dynamo.engine import api
from dynamo.engine.adapters import streams
from dynamo.protocols import kv_events

FACTS = api.EngineFacts(
    context_length=128,
    kv_block_size=16,
    total_kv_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=256,
)


class Adapters:
    """A library that records the calls to it."""

    name = "library"
    lora_names = ("poet",)

    def __init__(self):
        self.calls = []

    async def start(self, on_kv_events):
        return FACTS

    def death(self):
        return None

    async def stop(self):
        pass

    async def clear(self):
        self.calls.append("clear")

    async def clear_adapters(self):
        self.calls.append("clear adapters")

    async def load_lora(self, name, directory):
        self.calls.append("load")

    async def unload_lora(self, name):
        self.calls.append("unload")


class Sink:
    """Keeps the KV events."""

    def __init__(self):
        self.events = []

    def kv_events(self, events, dp_rank=0):
        self.events += events


async def test_reloaded_adapter_clears_no_tier_of_other_workers():
    library, sink = Adapters(), Sink()
    engine: api.Engine = streams.StreamingEngine(library, lora_adapters=library)
    await engine.start(sink)
    for _ in range(2):
        await engine.load_lora("poet", Path())
        await engine.unload_lora("poet")
    await engine.stop()

    assert library.calls == ["load", "unload", "clear adapters", "load", "unload"]
    assert sink.events == [kv_events.Cleared()]
