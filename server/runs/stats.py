"""Figures with their uncertainty."""

from __future__ import annotations

import math

Z95 = 1.959963984540054


def wilson(successes: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927); (0, 1) when nothing was counted."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return middle - half if successes else 0.0, middle + half if successes < n else 1.0
