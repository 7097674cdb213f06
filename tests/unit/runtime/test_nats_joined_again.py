"""What a process does by itself when NATS has dismissed it; `tests/contract` has the rest with a real server."""

import asyncio

import nats.errors

from dynamo.base import clock
from dynamo.runtime.backends.nats import access, connection


class Client:
    """A client at which the first to subscribe has all others close."""

    def __init__(self):
        self.living = []
        self.subjects = []

    async def connect(self, *servers, **options):
        pass

    async def subscribe(self, subject, **options):
        self.subjects.append(subject)
        for each in self.living:
            if each._subject != subject:
                await each.close()


async def test_subscription_that_is_closed_while_nats_is_joined_again_stays_closed(monkeypatch):
    client = Client()
    monkeypatch.setattr(connection, "_AGAIN_S", 0.0)
    monkeypatch.setattr(connection, "_PromptClient", lambda: client)
    joined = connection.NatsConnection(
        access.NatsAccess(urls=(), addresses=""), "n", clock.SystemClock()
    )
    for subject in "ab":
        made = connection.SubjectSubscription(subject, print, joined._subscriptions)
        joined._subscriptions.add(made)
        client.living.append(made)
    await joined._join_again()

    assert len(client.subjects) == len(joined._subscriptions) == 1


async def test_what_subscribes_while_nats_is_joined_again_is_subscribed_once(monkeypatch):
    connecting, server_back = asyncio.Event(), asyncio.Event()

    class Dismissed(Client):
        async def subscribe(self, subject, **options):
            raise nats.errors.ConnectionClosedError

    class Connecting(Client):
        async def connect(self, *servers, **options):
            connecting.set()
            await server_back.wait()

    client = Connecting()
    monkeypatch.setattr(connection, "_AGAIN_S", 0.0)
    monkeypatch.setattr(connection, "_PromptClient", lambda: client)
    joined = connection.NatsConnection(
        access.NatsAccess(urls=(), addresses=""), "n", clock.SystemClock()
    )
    joined._client = Dismissed()
    await joined.subscribe("a", print)
    joining = asyncio.create_task(joined._join_again())
    await connecting.wait()
    await joined.subscribe("b", print)
    server_back.set()
    await joining

    assert sorted(client.subjects) == ["a", "b"]


async def test_server_that_came_back_and_refuses_the_credentials_is_quoted(caplog):
    """Else the log says for ever that it is gone."""
    joined = connection.NatsConnection(
        access.NatsAccess(urls=(), addresses="n:4222"), "n", clock.SystemClock()
    )
    joined._is_joined = True
    for _ in range(3):  # nats-py tries again four times a second
        await joined._report_error(nats.errors.Error("nats: 'Authorization Violation'"))

    (record,) = caplog.records
    assert record.getMessage() == "NATS at n:4222: Error nats: 'Authorization Violation'"
