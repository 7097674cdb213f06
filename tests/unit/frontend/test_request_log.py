"""At debug, a request makes one line, which names it."""

import logging

from dynamo.frontend import request_records
from dynamo.observability import logs

NAME = "dynamo.frontend.records.request_log"


async def test_a_request_makes_a_line_at_debug(bare, caplog):
    caplog.set_level(logging.DEBUG, NAME)
    seen = []
    caplog.handler.addFilter(lambda record: seen.append(logs.log_context.get()) or True)
    await bare.start()
    await bare.worker()
    answer = await bare.chat()
    line = next(record.getMessage() for record in caplog.records if record.name == NAME)

    assert line.startswith("chat_completions of m: success, 5 tokens in ")
    assert answer.headers["x-request-id"] in {s.request_id for s in seen if s is not None}


def test_nobody_wants_it_by_default():
    assert not request_records.is_log_enabled()
