"""How many connections a process may have: each is an open file, and Linux allows 1,024 until a process asks for more.

The low number protects programs that use `select`; an event loop on epoll may ask for all that the system grants.
Beyond the limit a server cannot even accept a connection to refuse it, nor reach a worker.
"""

import resource

RESERVED = 200  # for the connections to workers, the planes, logs and libraries


def make_room(num_connections: int) -> int:
    """Raise our limit as far as needed and allowed; gives how many connections there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return max(1, min(num_connections, soft - RESERVED))
