"""Routes of every token from vLLM's CPU workers.

vLLM 0.31 has all that carries routes from a worker to the answer, but only its second model runner, which a CPU cannot run, fills it. Here
the first one does, between its two halves of a step: `execute_model` computes, `sample_tokens` draws.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import AuxOutputConfig, VllmConfig  # type: ignore[import-not-found]
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # type: ignore[import-not-found]
from vllm.v1.worker.cpu_worker import CPUWorker  # type: ignore[import-not-found]


class RoutesScheduler(Scheduler):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(_with_routes(vllm_config), *args, **kwargs)


class RoutesWorker(CPUWorker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(_with_routes(vllm_config), *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = RoutesRunner(self.vllm_config, torch.device("cpu"))


class RoutesRunner(CPUModelRunner):
    routes: Any = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if not is_profiling:
            self.routes = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.routes.begin_step(scheduler_output.aux_output_connector_metadata)
        self._caught[: scheduler_output.total_num_scheduled_tokens].fill_(-1)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        pending = self._snapshot() if self.execute_model_state is not None else None
        output = super().sample_tokens(*args, **kwargs)
        if pending is not None:
            sampled = [len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in pending.request_ids]
            pending.enqueue_cpu_copy(np.array(sampled), np.zeros(len(sampled), np.int64))
            output.aux_output_connector_output = pending.process_output()
        return output

    def _snapshot(self) -> Any:
        """The routes of the step under way. RuntimeError: a layer did not say where it sent a token."""
        requests = self.input_batch.num_reqs
        starts = self.query_start_loc.np[: requests + 1].copy()
        if (self._caught[: int(starts[-1])] < 0).any():
            raise RuntimeError("the experts of a token were not caught in every layer: routes would be wrong")
        computed = self.input_batch.num_computed_tokens_cpu[:requests].copy()
        batch = SimpleNamespace(req_ids=list(self.input_batch.req_ids), num_computed_tokens_np=computed, query_start_loc_np=starts)
        return self.routes.prepare_output(batch)

    @property
    def _caught(self) -> torch.Tensor:
        return self.routes._capturer.device_buffer


def _with_routes(config: VllmConfig) -> VllmConfig:
    """A copy with routes on. vLLM refuses the setting for a CPU whenever it checks its configuration, so that one is left alone."""
    if not (config.model_config.is_moe and config.model_config.enforce_eager and config.cache_config.enable_prefix_caching):
        raise ValueError("routes on the CPU need a mixture of experts, enforce_eager and prefix caching")
    own = copy.copy(config)
    own.aux_output_config = AuxOutputConfig(enable_return_routed_experts=True)
    return own
