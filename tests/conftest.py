"""Settings of every test: examples of properties have no deadline, because the machine may be busy.

Assertions of suites that several modules import are rewritten as those of their own tests.
"""

import hypothesis
import pytest

pytest.register_assert_rewrite("engine_suite", "sleeper_suite")

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
