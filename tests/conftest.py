"""Settings for every test. Machines are shared, so no property test has a deadline in wall-clock time."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
