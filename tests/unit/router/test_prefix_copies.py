"""Which copies of prefixes a router begins."""

import types

from dynamo.protocols import blocks, generate, instances, kv_transfer, model_card
from dynamo.router import prefix_copies, replication
from dynamo.router.api import Prompt, Worker
from dynamo.router.worker_load import Capacity, PrefillSpeed, WorkerLoad
from dynamo.testing import clock

BUSY, IDLE = Worker(1), Worker(2)


def card():
    data = {kv_transfer.METADATA_KEY: "bWV0YQ==", kv_transfer.PREFIXES_KEY: True}
    return model_card.ModelCard(
        display_name="m",
        source_path="m",
        context_length=1,
        kv_cache_block_size=10,
        runtime_config=model_card.ModelRuntimeConfig(runtime_data=data),
    )


def test_prompts_of_one_turn_begin_no_more_copies_than_may_run_at_once():
    loads = {worker: WorkerLoad(Capacity(), PrefillSpeed()) for worker in (BUSY, IDLE)}
    loads[BUSY].num_requests = 9
    selector = types.SimpleNamespace(
        count_cached=lambda prompt: {BUSY: 10}, active=types.SimpleNamespace(loads=loads)
    )
    begun = []
    copies = prefix_copies.PrefixCopies(
        types.SimpleNamespace(name=instances.EndpointName("n", "c", "e")),
        selector,
        None,
        clock.VirtualClock(),
        lambda name, work: begun.append(work),
    )
    copies.sources.set_model_cards({1: card(), 2: card()})
    request = generate.Request(id="r", model="m", token_ids=blocks.pack(range(100)))
    for first in range(0, 100 * (replication.MAX_COPIES + 1), 100):  # so many hot prefixes
        names = range(first + 1, first + 11)
        prompt = Prompt(num_tokens=100, block_size=10, sequence_hashes=names)
        for _ in range(replication.MIN_HOT_PROMPTS):
            copies.name_source(prompt, request, BUSY)
    for work in begun:
        work.close()

    assert len(begun) == replication.MAX_COPIES
