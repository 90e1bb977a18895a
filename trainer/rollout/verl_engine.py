"""The engine interface over verl's LLMServerClient."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from ray.exceptions import RayError

from trainer.engine.base import EngineError, Generation, OnTokens, Sampling, StopReason, TokenIds


class VerlEngine:
    """`client` is verl's `LLMServerClient`; sessions stick to one replica. Its calls answer once, so nothing is streamed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def generate(
        self,
        session: str,
        prompt_ids: TokenIds,
        sampling: Sampling,
        routes_from: int = 0,
        on_tokens: OnTokens | None = None,
        salt: str = "",
    ) -> Generation:
        try:
            output = await self._client.generate(
                session,
                prompt_ids=prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else list(prompt_ids),
                sampling_params={
                    "temperature": sampling.temperature,
                    "max_tokens": sampling.max_tokens,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "logprobs": True,
                },
                session=session,
                routes_from=routes_from,
                salt=salt,
            )
        except RayError as error:
            raise EngineError(f"generation failed: {str(error).strip().splitlines()[-1]}") from error
        return Generation(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            routes=output.routed_experts,
            stop_reason=cast(StopReason, output.stop_reason),
            version=output.extra_fields["global_steps"],
        )
