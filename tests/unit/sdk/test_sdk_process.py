"""How services ask each other."""

import pytest

from dynamo.base import errors
from dynamo.sdk import endpoint, process, service


@service(dynamo={"namespace": "demo"})
class Asked:
    """A service that others depend on."""

    @endpoint()
    async def generate(self, request: str):
        yield request


class Endpoint:
    """Its workers: each one's items, and then it is lost if the last one is LOST."""

    LOST = "lost"

    def __init__(self, *workers):
        self._workers = iter(workers)
        self.num_asked = 0

    async def wait_for_instances(self, timeout_s):
        """They are there."""

    async def stream(self, request, *, item_type, instance_id):
        self.num_asked += 1
        for item in next(self._workers):
            if item == self.LOST:
                raise errors.WorkerLost("it has ended")
            yield item


async def ask(workers, instance_id=None):
    runtime = type("Runtime", (), {"client": lambda self, url: workers})()
    call = process._caller(runtime, "demo", Asked)
    return [item async for item in call("generate", "hi", instance_id)]


async def test_worker_that_is_lost_before_its_first_item_is_replaced():
    workers = Endpoint(["lost"], ["one", "two"])

    assert await ask(workers) == ["one", "two"]
    assert workers.num_asked == 2


async def test_next_worker_is_waited_for_no_longer_than_any(monkeypatch):
    monkeypatch.setattr(process, "FIND_S", 0.0)
    workers = Endpoint(["lost"], ["one"])
    with pytest.raises(errors.WorkerLost):
        await ask(workers)

    assert workers.num_asked == 1


@pytest.mark.parametrize(
    ("workers", "instance_id", "num_asked"),
    [
        (Endpoint(["one", "lost"], ["one"]), None, 1),  # some of its answer has been given
        (Endpoint(["lost"], ["one"]), 0, 1),  # no other one will do
    ],
)
async def test_worker_that_cannot_be_replaced_fails_the_request(workers, instance_id, num_asked):
    with pytest.raises(errors.WorkerLost):
        await ask(workers, instance_id)

    assert workers.num_asked == num_asked
