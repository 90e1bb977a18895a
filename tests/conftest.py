"""Settings for every test. Machines are shared, so no property test has a deadline in wall-clock time, nor may drawing be too slow."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
