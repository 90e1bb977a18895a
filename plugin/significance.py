"""Whether a solve rate rose: Fisher's exact test for two proportions."""

from __future__ import annotations

from math import comb


def rise_p_value(solved_before: int, n_before: int, solved_after: int, n_after: int) -> float:
    """One-sided p-value of "the second sample's rate is higher" (Fisher 1935: the margins are fixed, so the count is hypergeometric).

    Exact up to the last division. Raises ValueError when a count does not fit its sample.
    """
    if not (0 <= solved_before <= n_before and 0 <= solved_after <= n_after):
        raise ValueError(f"counts outside their samples: {solved_before}/{n_before}, {solved_after}/{n_after}")
    solved = solved_before + solved_after
    as_extreme = sum(comb(n_after, k) * comb(n_before, solved - k) for k in range(solved_after, min(n_after, solved) + 1))
    return as_extreme / comb(n_before + n_after, solved)
