"""A CPU platform for verl, chosen by VERL_PLATFORM=cpu and never by probing."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _CpuModule(types.ModuleType):
    """torch.cpu plus the calls of torch.cuda that verl's workers make."""

    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(_zero)
    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = synchronize = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def device_count(self) -> int:
        return 1

    def current_device(self) -> str:
        return "cpu"

    def is_available(self) -> bool:
        return True

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


_MODULE = _CpuModule("trainer_torch_cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"  # verl hands it straight to Tensor.to()

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # ResourcePoolManager counts "GPU" and "NPU" only: Ray is started with logical GPUs

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
