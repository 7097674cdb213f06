"""What one HTTP server takes from its clients: in size, time and number."""

from dataclasses import dataclass

NUM_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beyond any of these a client is refused, or cut off if it can no longer be told."""

    header_bytes: int = 64 * 2**10
    num_headers: int = 100
    body_bytes: int = 192 * 2**20
    request_s: float = 60.0  # a request, once begun, must have arrived
    idle_s: float = 75.0  # between two requests of a connection
    write_buffer_bytes: int = 8 * 2**20  # what may wait for a client that does not read
    num_connections: int = NUM_CONNECTIONS
    linger_s: float = 5.0  # a refused client may go on sending before it is cut off
    sweep_s: float = 1.0  # how often, and so how exactly, the times above are looked at
