"""How many examples a property test tries: a share of the profile's own number, so that a thorough profile is thorough everywhere."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

_USUAL = settings.get_profile("default").max_examples


def examples(number: int, **changes: Any) -> settings:
    """`number` examples in the usual profiles and in proportion in others, for a test whose examples are dear or cheap."""
    return settings(max_examples=max(1, number * settings().max_examples // _USUAL), **changes)
