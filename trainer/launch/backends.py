"""What the training backend and the rollout engine of a spec are to verl: its keys for precision, parallelism, replay and memory."""

from __future__ import annotations

from typing import Any

from server.schemas.runspec import RunSpec
from trainer.engine.vllm_cpu import ROUTES

ACTOR = "actor_rollout_ref.actor"
VLLM_CPU_CACHE = 256_000_000
"""Bytes of KV cache; without a figure vLLM takes a share of the machine's memory."""

VLLM_ON_GPUS = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend": "triton"}
"""Of vLLM's kernels for experts the one that keeps their weights in the layout of a checkpoint: new ones are loaded into it in place."""


def backend_settings(spec: RunSpec) -> dict[str, Any]:
    """The keys of `trainer.backend`. VeOmni and Megatron are other parts of verl's configuration (`model_engine`)."""
    match spec.trainer.backend:
        case "fsdp2":
            return _fsdp2(spec)
        case "veomni":
            return {"model_engine": "veomni"} | _engine(spec, "veomni", _veomni(spec))
        case "megatron":
            return {"model_engine": "megatron"} | _engine(spec, "megatron", _megatron(spec))


def engine_settings(spec: RunSpec) -> dict[str, Any]:
    """The keys of `rollout.engine`. An engine that shares GPUs with training gives its cache back while training goes on."""
    cluster = spec.trainer.cluster
    apart = cluster.rollout_nodes > 0
    rollout: dict[str, Any] = {
        "tensor_model_parallel_size": spec.rollout.tensor_parallel,
        "free_cache_engine": spec.trainer.device == "cuda" and not apart,
    }
    if spec.rollout.engine == "vllm":
        rollout |= {"gpu_memory_utilization": spec.rollout.gpu_memory, "enable_prefix_caching": True}
    settings = {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
    if spec.rollout.engine == "vllm":
        settings |= _vllm_on_cpu(spec.algorithm.routing_replay) if spec.trainer.device == "cpu" else VLLM_ON_GPUS
    if apart:
        settings |= {
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.nnodes": cluster.rollout_nodes,
            "actor_rollout_ref.rollout.n_gpus_per_node": cluster.gpus_per_node,
            "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
        }
    return settings


def _vllm_on_cpu(routes: bool) -> dict[str, Any]:
    """In fp32 as the trainer, without the compiled graph, which costs a minute at the start. Its routes come from our plug-in."""
    rollout = {"dtype": "float32", "load_format": "auto", "enforce_eager": True, "enable_rollout_routing_replay": False}
    own = {"kv_cache_memory_bytes": VLLM_CPU_CACHE} | ({name: ROUTES[name] for name in ("worker_cls", "scheduler_cls")} if routes else {})
    added = {"enable_sleep_mode": False} | {f"engine_kwargs.vllm.{name}": value for name, value in own.items()}
    settings: dict[str, Any] = {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
    return settings | {f"+actor_rollout_ref.rollout.{key}": value for key, value in added.items()}


def _fsdp2(spec: RunSpec) -> dict[str, Any]:
    """On a CPU in fp32; on GPUs weights and optimizer in fp32 and passes in bf16, verl's default."""
    trainer = spec.trainer
    settings: dict[str, Any] = {
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.optim.lr_scheduler_type": "constant",
        f"{ACTOR}.fsdp_config.model_dtype": "fp32",
        f"{ACTOR}.fsdp_config.seed": trainer.seed,
        f"{ACTOR}.fsdp_config.param_offload": trainer.offload,
        f"{ACTOR}.fsdp_config.optimizer_offload": trainer.offload,
        f"{ACTOR}.ulysses_sequence_parallel_size": trainer.parallel.sequence,
    }
    if trainer.device == "cpu":
        settings |= {
            f"{ACTOR}.use_torch_compile": False,
            f"{ACTOR}.fsdp_config.use_torch_compile": False,
            f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
            f"+{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "fp32",
        }
    return settings


def _veomni(spec: RunSpec) -> dict[str, Any]:
    return {
        "optim.lr_scheduler_type": "constant",
        "veomni.ulysses_parallel_size": spec.trainer.parallel.sequence,
        "veomni.expert_parallel_size": spec.trainer.parallel.expert,
    }


def _megatron(spec: RunSpec) -> dict[str, Any]:
    parallel = spec.trainer.parallel
    return {
        "optim.lr_decay_style": "constant",
        "megatron.tensor_model_parallel_size": parallel.tensor,
        "megatron.expert_model_parallel_size": parallel.expert,
        "megatron.context_parallel_size": parallel.context,
        "megatron.pipeline_model_parallel_size": parallel.pipeline,
        "megatron.override_transformer_config.recompute_granularity": "full",  # what gradient checkpointing is to the others
        "megatron.override_transformer_config.recompute_method": "uniform",
        "megatron.override_transformer_config.recompute_num_layers": 1,
    }


def _engine(spec: RunSpec, name: str, own: dict[str, Any]) -> dict[str, Any]:
    """What VeOmni and Megatron have in common. verl replays routes in both by itself (R3)."""
    common = {
        f"{name}.seed": spec.trainer.seed,
        f"{name}.param_offload": spec.trainer.offload,
        f"{name}.optimizer_offload": spec.trainer.offload,
        f"{name}.router_replay.mode": "R3" if spec.algorithm.routing_replay else "disabled",
    }
    return {f"{ACTOR}.{key}": value for key, value in (common | own).items()}
