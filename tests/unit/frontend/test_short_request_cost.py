"""The work of a plain short request, in calls of our functions: a count that hardly depends on the machine's load."""

import sys
from pathlib import Path

from frontend_rig import outputs

import dynamo.frontend

SOURCE = str(Path(dynamo.frontend.__file__).parents[1])
# A ratchet: lower it when the count falls. It was 295 to 299, with HTTP and the scripted worker, on a busy machine; the
# rest is room for timers, which a busier one has run in each round.
MOST_CALLS = 320
ROUNDS = 10  # of which the shortest counts


async def count_calls(work):
    """Return what `work` returns, and how many calls of functions of this package came meanwhile."""
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    sys.setprofile(count)
    try:
        result = await work
    finally:
        sys.setprofile(None)
    return result, num_calls


async def test_plain_short_request_passes_few_functions(rig):
    rig.one.script = outputs("h")
    await rig.chat()  # which opens connections and fills caches

    counts = []
    for _ in range(ROUNDS):
        response, num_calls = await count_calls(rig.chat())
        assert response.status_code == 200
        counts.append(num_calls)

    assert min(counts) <= MOST_CALLS
