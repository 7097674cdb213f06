"""What holds for every test: no example of a property is timed, because the machine may be busy with others."""

import hypothesis

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
