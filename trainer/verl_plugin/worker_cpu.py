"""The training worker on a CPU: gloo, one thread, and for a synchronous trainer the rollout engine inside. There generation and training
share this process and its event loop: they never overlap.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from .worker import LegoWorker


class CpuWorker(LegoWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():  # verl would ask for "cpu:gloo,cpu:gloo", which torch rejects
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def engine_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call to the rollout server in this process. No `torch.no_grad()` here: across an await it leaks into training."""
        return await getattr(self.rollout.server, method)(*args, **kwargs)
