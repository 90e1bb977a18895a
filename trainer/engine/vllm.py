"""The engine interface over vLLM's in-process `AsyncLLM` (0.31): streamed tokens, routes, abort, salted prefix cache, weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .base import KV, EngineError, EngineGone, Generation, GenerationRequest, StopReason

ALIVE_S = 1.0
"""How often it is looked at whether the engine's process still lives while a call to it is waited for."""
GONE = "the process of vLLM's engine died"


@dataclass(frozen=True, slots=True)
class Probe:
    """What the trainer's own forward says of a text under the weights that the engine is about to get.

    Stock vLLM takes some weights as silent garbage: on the CPU the experts of a mixture, and an output layer that is tied to the embedding
    (our plug-in mends both).
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    """Of `ids[1:]`, at temperature 1, in nats."""
    tolerance: float
    """Largest mean difference of a log-probability that the two programs' arithmetic explains, in nats. In bf16 a token differs by a nat
    where a router just chose another expert; wrong weights move all tokens."""


class VllmEngine:
    """`engine` is an `AsyncLLM`. It must give log-probabilities of the distribution that it sampled from (`processed_logprobs`)."""

    def __init__(self, engine: Any) -> None:
        if engine.model_config.logprobs_mode != "processed_logprobs":
            raise ValueError(f"vLLM's logprobs_mode is {engine.model_config.logprobs_mode}: start it with processed_logprobs")
        self._engine, self.version = engine, 0
        self._admitting, self._idle = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        self._running = set[str]()
        self._prompted = self._reused = 0
        self._name = uuid.uuid4().hex

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`. A pause ends the turn as `aborted`, with what it has. EngineError: vLLM refused or died."""
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.exceptions import VLLMClientError  # type: ignore[import-not-found]
        from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # type: ignore[import-not-found]

        sampling, prompt = request.sampling, np.asarray(request.prompt_ids).tolist()
        longest = self._engine.model_config.max_model_len
        if len(prompt) + sampling.max_tokens > longest:  # vLLM would sample fewer tokens without a word
            raise EngineError(f"{len(prompt)} prompt tokens and {sampling.max_tokens} to sample exceed the context of {longest}")
        await self._admitting.wait()
        version, tokens, log_probs = self.version, list[int](), list[float]()
        asked = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the request alone says where a turn stops
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            routed_experts_prompt_start=request.routes_from,
        )
        salted = TokensPrompt(prompt_token_ids=prompt, cache_salt=f"{request.salt}@{version}")
        end, name = cast(Any, None), uuid.uuid4().hex
        self._running.add(name)
        try:
            async for output in self._engine.generate(salted, asked, request_id=name):
                if end is None:
                    self._prompted, self._reused = self._prompted + len(prompt), self._reused + (output.num_cached_tokens or 0)
                end = output.outputs[0]
                ids = list(end.token_ids)
                new = [entry[token].logprob for token, entry in zip(ids, end.logprobs or (), strict=True)]
                tokens, log_probs = tokens + ids, log_probs + new
                if ids and request.on_tokens is not None:
                    request.on_tokens(ids, new)
        except EngineDeadError as error:
            raise EngineGone(GONE) from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise EngineError(f"vLLM: {error or type(error).__name__}") from error
        finally:
            self._running.discard(name)
            if not self._running:
                self._idle.set()
        stop = "aborted" if end is None or end.finish_reason == "abort" else end.finish_reason
        routes = None if end is None else end.routed_experts
        return Generation(tokens, log_probs, routes, cast(StopReason, stop), version)

    def kv(self) -> KV:
        """In vLLM's blocks."""
        cache = self._engine.vllm_config.cache_config
        return KV(cache.num_gpu_blocks, cache.block_size, {}, {}, None, self._prompted, self._reused, self._name)

    async def update_weights(self, load: Callable[[], Coroutine[Any, Any, object]], version: int, probe: Probe) -> None:
        """End what runs, call `load`, and serve `version` if the weights are what the trainer has.

        After an error nothing is admitted any more: the weights are in between.
        """
        await self.pause()
        await self.living(load())
        await self.serve(version, probe)

    async def pause(self) -> None:
        """End every turn as `aborted` and admit none until `serve`."""
        self._admitting.clear()
        await self.living(self._engine.pause_generation(mode="abort", clear_cache=False))  # 0.31 cannot clear while it captures routes
        while self._running:  # one that was admitted just before may arrive behind the pause, and would wait there for the new weights
            self._idle.clear()
            await self._engine.abort(list(self._running))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), 0.05)

    async def serve(self, version: int, probe: Probe) -> None:
        """Go on after `pause` under weights that are called `version`. EngineError: they are not what the trainer has."""
        if not await self.living(self._engine.reset_prefix_cache()):
            raise EngineError("vLLM kept KV of the old weights: its prefix cache could not be cleared")
        self.version = version
        await self.living(self._engine.resume_generation())
        await self.living(self._compare(probe))
        self._admitting.set()

    async def living[T](self, call: Coroutine[Any, Any, T]) -> T:
        """What a call to vLLM returns. EngineGone: its process died, which vLLM 0.31 does not tell the calls that wait for an answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({task}, timeout=ALIVE_S))[0]:
                if self._engine.errored:
                    raise EngineGone(GONE)
            return await task
        except EngineDeadError as error:
            raise EngineGone(GONE) from error
        finally:
            task.cancel()

    async def _compare(self, probe: Probe) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(probe.ids))
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = [output async for output in self._engine.generate(prompt, asked, request_id=uuid.uuid4().hex)]
        found = [entry[token].logprob for token, entry in zip(probe.ids[1:], outputs[-1].prompt_logprobs[1:], strict=True)]
        difference = float(np.abs(np.subtract(found, probe.log_probs)).mean())
        if not difference <= probe.tolerance:
            raise EngineError(
                f"vLLM does not compute with the weights of version {self.version}: its log-probabilities differ from the trainer's by "
                f"{difference:.3g} nats on average, {probe.tolerance:g} are allowed. This build cannot take new weights of this model"
            )
