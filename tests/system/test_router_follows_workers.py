"""A router's index follows real workers: their requests, their death, their successors."""

import asyncio

from deployment import MODEL

from dynamo.base import clock as clocks
from dynamo.protocols import generate
from dynamo.router import kv_event_subscriber, prefix_index
from dynamo.runtime import component
from waiting import PATIENT_S


class Router:
    """An index in this process, fed by the deployment's workers."""

    async def __aenter__(self):
        self.index = prefix_index.PrefixIndex()
        self.feed = kv_event_subscriber.KvEventSubscriber(
            self.runtime,
            self.index,
            namespace="dynamo",
            component_name="backend",
            clock=clocks.SystemClock(),
        )
        await self.feed.start()
        return self

    async def __aexit__(self, *error):
        await self.feed.close()
        await self.runtime.close()

    @classmethod
    async def join(cls, deployment):
        router = cls()
        settings = component.RuntimeConfig(file_kv=deployment.environ["DYN_FILE_KV"])
        router.runtime = await component.DistributedRuntime.open(
            settings, item_type=generate.Output
        )
        return router

    def held(self):
        held = {}
        for worker, _, names in self.index.cached_runs():
            held.setdefault(worker.instance_id, set()).update(names)
        return held

    async def until(self, is_so):
        async with asyncio.timeout(PATIENT_S):
            while not is_so(self.held()):
                await asyncio.sleep(0.01)


async def held_by(deployment):
    """What the workers themselves say that they hold: what a new router learns."""
    async with await Router.join(deployment) as late:
        await late.until(lambda held: held and late.feed.is_current)
        return late.held()


async def serve(deployment, frontend, text):
    await asyncio.to_thread(frontend.await_models, [MODEL])
    answer = await asyncio.to_thread(frontend.chat, text, max_tokens=100, ignore_eos=True)
    assert answer.status_code == 200


async def test_killed_worker_is_removed_and_the_next_one_indexed(deployment):
    worker, frontend = deployment.mocker("--speedup-ratio", "1000"), deployment.frontend()
    async with await Router.join(deployment) as router:
        await serve(deployment, frontend, "Tell me a story about a cat " * 20)
        first = await held_by(deployment)
        await router.until(lambda held: held == first)
        worker.kill()
        await router.until(lambda held: not held)
        await asyncio.to_thread(
            frontend.await_models, []
        )  # it may hear of it later than the router
        deployment.native()
        await serve(deployment, frontend, "Tell me a story about a dog " * 20)
        second = await held_by(deployment)
        await router.until(lambda held: held == second)

    assert first.keys() != second.keys()
    assert all(len(names) >= 3 for names in (*first.values(), *second.values()))
