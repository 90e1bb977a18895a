"""The engine interface: token ids in, token ids out. One engine serves the sessions of many rollouts at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

StopReason = Literal["stop", "length", "aborted"]
TokenIds = Sequence[int] | np.ndarray
"""Token ids; an array is one-dimensional int32."""
OnTokens = Callable[[list[int], list[float]], None]
"""Newly sampled ids and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a rollout. They come from the RunSpec, never from the client. `temperature` 0 is greedy."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn.

    `token_ids` (n) includes the stop token when one was sampled. `log_probs` (n) are natural logs under the distribution that was sampled
    from. `routes` holds the experts of positions `routes_from … len(prompt) + n - 2`, shape [rows, layers, top_k], in the narrowest
    unsigned type that holds the expert count; None for a dense model. The last sampled token was never an input, so it has no row.
    `version` is the number of weight updates the engine had taken. `spans` is for a turn that several versions sampled: (offset in
    `token_ids`, version), ascending from 0; empty when `version` sampled all of it.
    """

    token_ids: list[int]
    log_probs: list[float]
    routes: np.ndarray | None
    stop_reason: StopReason
    version: int
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KV:
    """What an engine's KV cache holds, in units of its own (slots, blocks) of `unit` tokens.

    `held` has the units of every session that has any, `resident` the tokens of its longest cached sequence; vLLM, which tells neither, has
    both empty. The rest counts from the engine's start: `evicted` cached sequences that were given up for other sessions, None where the
    engine does not say, `reused` tokens of all `prompted` ones. `engine` is a name that no other engine has.
    """

    capacity: int
    unit: int
    held: Mapping[str, int]
    resident: Mapping[str, int]
    evicted: int | None = 0
    prompted: int = 0
    reused: int = 0
    engine: str = ""

    def __add__(self, other: KV) -> KV:
        """Of two engines together; a session may be known to both."""
        return KV(
            self.capacity + other.capacity,
            self.unit,
            Counter(self.held) + Counter(other.held),
            Counter(self.resident) | Counter(other.resident),
            None if self.evicted is None or other.evicted is None else self.evicted + other.evicted,
            self.prompted + other.prompted,
            self.reused + other.reused,
        )


class EngineError(Exception):
    """The engine could not answer: `Failed(engine)`, never a reward."""


class EngineGone(EngineError):
    """The engine's process has died, and this start of the trainer will not have another one."""


class EngineUnavailable(EngineError):
    """A trouble that passes (a restart, no free replica, a lost connection): the same call may be made again."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One turn to sample behind `prompt_ids`.

    `on_tokens` is called on the loop with newly sampled ids and their log-probabilities, in order, before `generate` returns; an engine
    that cannot stream never calls it. KV that was computed under another `salt` is not reused.
    """

    session: str
    prompt_ids: TokenIds
    sampling: Sampling
    routes_from: int = 0
    on_tokens: OnTokens | None = None
    salt: str = ""


class Engine(Protocol):
    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn. Cancelling the awaiting task aborts the generation. Raises EngineError."""
        ...


@runtime_checkable
class ReportsKV(Protocol):
    """An engine that can say what its cache holds."""

    def kv(self) -> KV | None:
        """As far as it is known by now; None before anything is."""
        ...
