"""Settings of every test: examples of properties have no deadline, because the machine may be busy.

Assertions of suites that several modules import are rewritten as those of their own tests. httpx reads the certificates
of the system for every request that is made without a client, 44 ms of processor time; here it does so once.
"""

import functools

import hypothesis
import pytest
from httpx._transports import default

collect_ignore = ["clients"]  # have an environment and settings of their own (`make test-clients`)

pytest.register_assert_rewrite("engine_suite", "sleeper_suite")

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

default.create_ssl_context = functools.cache(default.create_ssl_context)
