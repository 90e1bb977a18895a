"""Settings for every test. Machines are shared, so no property test has a deadline in wall-clock time, nor may drawing be too slow.

`shared` draws new examples each time, `thorough` twenty times as many (`make test-properties`), Hypothesis' own `ci` the same ones for the
same code (`.ci/run`). The parent is named because Hypothesis makes `ci` the default where it finds the environment variable CI.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared", settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("shared"), max_examples=2000)
settings.load_profile("shared")
