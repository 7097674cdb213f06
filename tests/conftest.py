"""What holds for every test: no example of a property is timed, because the machine may be busy with others.

A suite that several modules import says what went wrong as their own tests do.
"""

import hypothesis
import pytest

pytest.register_assert_rewrite("engine_suite", "sleeper_suite")

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
