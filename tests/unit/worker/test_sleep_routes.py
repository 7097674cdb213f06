"""The routes by which a worker is told to sleep, over a real socket."""

import pytest
import told_worker

from dynamo.base import errors
from dynamo.worker import sleep_routes


class Asked(told_worker.Told):
    said = "done"

    async def sleep(self, level):
        return self.told("sleep", level)

    async def wake_up(self, tags):
        return self.told("wake up", *tags)


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
async def client(asked):
    async with told_worker.client_of(sleep_routes.table(asked), "/engine") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("sleep", b"", ("sleep", 1)),
        ("sleep", b"{}", ("sleep", 1)),
        ("sleep", b'{"level": 2}', ("sleep", 2)),
        ("wake_up", b"", ("wake up",)),
        ("wake_up", b'{"tags": ["weights", "kv_cache"]}', ("wake up", "weights", "kv_cache")),
    ],
)
async def test_what_is_asked_is_told(client, asked, path, body, told):
    answer = await client.post(path, content=body)

    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "message": "done"})
    assert asked.heard == [told]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("sleep", b'{"level": 3}', "level: expected a whole number from 1 to 2, got 3"),
        ("sleep", b'{"level": "deep"}', "level: expected a whole number from 1 to 2"),
        ("sleep", b'{"depth": 1}', "`depth`"),
        ("sleep", b"[", "no valid JSON"),
        ("wake_up", b'{"tags": ["mind"]}', "tags[0]: expected 'kv_cache' or 'weights', got"),
        ("wake_up", b'{"tags": 5}', "tags: expected a list"),
    ],
)
async def test_a_field_that_is_wrong_is_named(client, asked, path, body, says):
    answer = await client.post(path, content=body)

    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert asked.heard == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [(errors.Conflict("the worker is waking up"), 409), (errors.EngineFailed("no memory"), 500)],
)
async def test_what_cannot_be_done_has_its_status(client, asked, failure, status):
    asked.failure = failure

    answer = await client.post("sleep")

    assert answer.status_code == status
    assert answer.json() == {"error": {"message": str(failure), "code": status}}


async def test_looking_does_not_put_it_to_sleep(client, asked):
    answer = await client.get("sleep")

    assert answer.status_code == 405
    assert asked.heard == []
