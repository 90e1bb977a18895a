"""What objective and schedule of a spec are to verl. Row weights and mini-batches are assembled by our trainer, whatever these say."""

from __future__ import annotations

from typing import Any

from server.schemas.runspec import Algorithm, Trainer

REF = "actor_rollout_ref.ref"


def objective_settings(algorithm: Algorithm, device: str) -> dict[str, Any]:
    """verl's loss modes: `gspo` has one ratio per sequence, `vanilla` one per token."""
    actor = {
        "policy_loss.loss_mode": "gspo" if algorithm.loss == "gspo" else "vanilla",
        "loss_agg_mode": "token-mean" if algorithm.loss == "ppo" else "seq-mean-token-mean",
        "clip_ratio_low": algorithm.clip_low,
        "clip_ratio_high": algorithm.clip_high,
        "ppo_epochs": algorithm.epochs,
        "use_kl_loss": algorithm.kl > 0,
        "kl_loss_coef": algorithm.kl,
        "kl_loss_type": "low_var_kl",
    }
    settings = {f"actor_rollout_ref.actor.{key}": value for key, value in actor.items()}
    return settings | (_reference_on_cpu() if algorithm.kl and device == "cpu" else {})


def _reference_on_cpu() -> dict[str, Any]:
    """In fp32 as the policy. verl moves a model that only runs forward to pinned host memory, which needs a GPU's driver; any other one
    has an optimizer, whose settings are not used."""
    return {
        f"+{REF}.optim": "${actor_rollout_ref.actor.optim}",
        f"{REF}.fsdp_config.forward_only": False,
        f"{REF}.fsdp_config.use_torch_compile": False,
        f"{REF}.fsdp_config.model_dtype": "fp32",
        f"+{REF}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"+{REF}.fsdp_config.mixed_precision.reduce_dtype": "fp32",
    }


def schedule_settings(trainer: Trainer) -> dict[str, Any]:
    if trainer.schedule == "sync":
        return {"trainer.v1.trainer_mode": "lego_sync"}
    settings: dict[str, Any] = {
        "trainer.v1.trainer_mode": "lego_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "data.gen_batch_size": 1,  # a dropped prompt is replaced by one
    }
    if trainer.device == "cpu":
        settings |= {
            "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.n_gpus_per_node": 1,
            "actor_rollout_ref.rollout.checkpoint_engine.backend": "object_store",
        }
    return settings
