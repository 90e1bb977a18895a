"""A training sample: one branch of a rollout's message graph, as aligned arrays of one length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.schemas.capture import BranchClass, BranchReason, Exclusion


@dataclass(frozen=True, slots=True)
class Sample:
    """Invariant: `tokens[:k]` for any k that ends a sampled span is exactly prompt + completion of that model call.

    All arrays have length n. `mask` is True exactly on tokens the engine sampled and this branch owns: a token that several branches
    share is trained in one of them. `log_probs` is 0 where `mask` is False. `versions` is -1 where `mask` is False. `routes` is
    [n, layers, top_k] or None; a row is valid where `routed` is True (never the last token). `prompt_len` tokens precede the first
    trained one and are at least 1.
    """

    tokens: np.ndarray  # int32
    mask: np.ndarray  # bool
    log_probs: np.ndarray  # float32
    versions: np.ndarray  # int32
    routes: np.ndarray | None
    routed: np.ndarray  # bool
    prompt_len: int
    reason: BranchReason
    branch_class: BranchClass
    excluded: Exclusion | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        lengths = {len(self.mask), len(self.log_probs), len(self.versions), len(self.routed)}
        if lengths != {n} or (self.routes is not None and len(self.routes) != n):
            raise ValueError(f"sample arrays disagree on length: tokens {n}, others {sorted(lengths)}")
        if not 1 <= self.prompt_len <= n or self.mask[: self.prompt_len].any():
            raise ValueError(f"prompt_len {self.prompt_len} must leave every trained token behind it")
