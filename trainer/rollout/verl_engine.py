"""The engine interface over verl's LLMServerClient."""

from __future__ import annotations

import uuid
from functools import reduce
from operator import add
from typing import Any, Literal, cast

import numpy as np
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from trainer.engine.base import KV, EngineError, EngineGone, EngineUnavailable, Generation, GenerationRequest, StopReason
from trainer.launch import PERHAPS


class VerlEngine:
    """`client` is verl's `LLMServerClient`. In verl 0.9.1 its one call answers once, so nothing is streamed. It knows no abort either, and
    gives every call an id of its own that it does not tell (`full_determinism` apart), so verl's vLLM server, which can abort by that id,
    cannot be asked to; a cancelled call is taken back through Ray where the server's handle is ours (`verl_plugin.rollout_cpu`).

    verl's balancer keeps a name on one replica: `routing: sticky` gives it the session, `spread` a new name for every call.
    """

    def __init__(self, client: Any, routing: Literal["sticky", "spread"]) -> None:
        self._client, self._routing = client, routing
        self.gone: EngineGone | None = None
        """Set when a process that generates was found dead."""
        self._kv: dict[str, KV] = {}
        self._over: list[str] = []
        """Released sessions that the engine does not know of yet."""

    def kv(self) -> KV | None:
        """Of all replicas together, each as of its last answer: verl's client has no way to ask."""
        return reduce(add, self._kv.values()) if self._kv else None

    def release(self, session: str) -> None:
        """The session is over; the engine hears of it with the next call."""
        self._over.append(session)

    async def generate(self, request: GenerationRequest) -> Generation:
        sampling = request.sampling
        name = request.session if self._routing == "sticky" else uuid.uuid4().hex
        released, self._over = self._over, []
        try:
            output = await self._client.generate(
                name,
                prompt_ids=np.asarray(request.prompt_ids).tolist(),
                sampling_params={
                    "temperature": sampling.temperature,
                    "max_tokens": sampling.max_tokens,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "logprobs": True,
                },
                session=request.session,
                routes_from=request.routes_from,
                salt=request.salt,
                released=released,
                on_tokens=request.on_tokens,
            )
        except RayError as error:
            if isinstance(error, ActorDiedError | EngineGone):
                self.gone = EngineGone(f"generation failed: the process of the engine died. {PERHAPS}")
                raise self.gone from error
            kind = EngineUnavailable if isinstance(error, ActorUnavailableError | EngineUnavailable) else EngineError
            raise kind(f"generation failed: {str(error).strip().splitlines()[-1]}") from error
        if (kv := output.extra_fields.get("kv")) is not None:
            self._kv[kv.engine] = kv
        return Generation(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            routes=output.routed_experts,
            stop_reason=cast(StopReason, output.stop_reason),
            version=output.extra_fields["global_steps"],
        )
