"""How an operator has a worker sleep and wake: two routes of its system port, by the names of the original.

POST /engine/sleep      {"level": 1}             200 when it sleeps; 1: weights wait in host memory, 2: they are lost
POST /engine/wake_up    {"tags": ["weights"]}    200 when that is back; without tags all of it

What has happened already is no error. 400 names a field that is wrong, 409 says that another change is under way.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

import msgspec

from dynamo.protocols import openai_decode
from dynamo.runtime.http import exchange, router
from dynamo.worker import replies, sleeping

_Change = Callable[[bytes], Awaitable[Mapping[str, object]]]


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of one."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class WakeUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the other."""

    tags: list[Literal["weights", "kv_cache"]] = []


_decode_sleep = openai_decode.RequestDecoder(Sleep).decode
_decode_wake_up = openai_decode.RequestDecoder(WakeUp).decode


def table(asked: sleeping.Sleeping) -> Mapping[tuple[str, str], router.Handler]:
    """For the system port of the worker that is asked."""

    async def sleep(body: bytes) -> Mapping[str, object]:
        return _ok(await asked.sleep(_decode_sleep(body).level))

    async def wake_up(body: bytes) -> Mapping[str, object]:
        return _ok(await asked.wake_up(_decode_wake_up(body).tags))

    return {
        ("POST", "/engine/sleep"): functools.partial(_answer, sleep),
        ("POST", "/engine/wake_up"): functools.partial(_answer, wake_up),
    }


async def _answer(change: _Change, request: exchange.Exchange) -> None:
    await replies.reply(request, change(request.request.body or b"{}"))


def _ok(message: str) -> Mapping[str, object]:
    return {"status": "ok", "message": message}
