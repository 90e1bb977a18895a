"""What verl calls in vLLM's worker processes, for vLLM's CPU build.

That build packs weights for its kernels when it loads them and keeps no loader for the packed form, so verl's way of loading into the
running model fails. vLLM's own reload goes through the unpacked form.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker by name (`worker_extension_cls`)."""

    def update_weights_from_ipc(self, use_shm: bool = True, **_: Any) -> None:
        named: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda part, _: named.extend((name, tensor.clone()) for name, tensor in part))
        self.model_runner.reload_weights(weights_iterator=iter(named))
