"""What stands in a queue that prefill workers share, and what they say of it.

A *ticket* stands for a prompt: who takes it may compute that, and finds on it whom to ask. The prompt itself stays
where it is until then, so nothing that a user wrote lies on a server's disk, and no prompt is too long.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from dynamo.protocols import instances
from dynamo.runtime import work_queue

CLAIMS = "prefill_claims"  # the endpoint, beside a decode worker's own, where tickets are claimed
FROM_QUEUE = "takes_prefill_tickets"  # in a prefill worker's runtime data
BOUNDS = work_queue.Bounds(
    max_items=10_000,
    max_bytes=16 * 2**20,
    max_item_bytes=2048,
    acknowledge_s=3.0,  # what a worker's death costs its prompts, at most
)


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that waits. `transport` maps a request plane's name to the address where it can be claimed."""

    number: str
    endpoint: str  # its path there
    transport: dict[str, str]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Said by a prefill worker that has taken a ticket and is ready to compute. The reply is one boolean, and comes
    late: true once there is nothing more to do for the prompt, false if another worker should take the ticket.
    """

    number: str
    instance_id: int
    num_deliveries: int


def queue_name(endpoint: instances.EndpointName, model: str, checksums: Mapping[str, str]) -> str:
    """One queue for each model; of two whose files differ each has its own."""
    told = msgspec.json.encode((endpoint.path, model, sorted(checksums.items())))
    return f"prefill {endpoint.path} {hashlib.sha256(told).hexdigest()[:16]}"
