"""RunSpec → overrides of verl's `ppo_trainer` configuration. Every field that means something to verl arrives here and nowhere else."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.schemas.rundir import RunDir
from server.schemas.runspec import Kind, RunSpec
from server.schemas.tasks import HELD_OUT, TRAIN

from . import environment
from .backends import backend_settings, engine_settings
from .learning import objective_settings, schedule_settings

MICRO_BATCH_TOKENS = 4096
"""Padded tokens per forward pass, measured with the demo policy: 1024 costs a fifth more, 8192 gains nothing."""
SCORING = ("rollout.log_prob_micro_batch_size_per_gpu", "ref.log_prob_micro_batch_size_per_gpu")
"""verl's sizes of passes without a gradient: the policy's own ones stand under its rollout."""
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
SMALL_ACTORS, CPUS_PER_GPU = 16, 4
"""CPUs of a Ray cluster of the run's own, which are logical: each of verl's small actors reserves one, and the place of a GPU three."""
ROWS_PER_ROLLOUT = 16
"""Room in the TransferQueue: branches per rollout on average, far above what harnesses make."""


@dataclass(frozen=True, slots=True)
class Place:
    """What verl must know beside the spec: where the run lies and what the launcher prepared."""

    run: RunDir
    run_id: str
    model: Path
    ray_temp: Path
    py_executable: Path | None = None
    """Stand-in for the interpreter that forks workers from the zygote; None starts them plainly."""
    attempt: int = 1
    """How often the trainer was started."""
    step: int = 0
    """Updates in the checkpoint that a later attempt goes on from."""


def overrides(spec: RunSpec, place: Place) -> list[str]:
    """Hydra overrides, `+` where verl's own file lacks the key."""
    return [f"{key}={_text(value)}" for key, value in settings(spec, place).items()]


def settings(spec: RunSpec, place: Place) -> dict[str, Any]:
    """verl's key → value, with Hydra's `+` in front of a key that verl's own file lacks."""
    return (
        _run(spec, place)
        | _data(spec, place)
        | _model(spec, place)
        | _actor(spec)
        | objective_settings(spec.algorithm, spec.trainer.device)
        | schedule_settings(spec.trainer)
        | backend_settings(spec)
        | _rollout(spec)
        | engine_settings(spec)
        | _machine(spec, place)
    )


def _run(spec: RunSpec, place: Place) -> dict[str, Any]:
    steps, checkpoint = spec.trainer.steps, spec.trainer.checkpoint
    resume = {"trainer.resume_mode": "disable"}
    if place.step:
        folder = place.run.checkpoints / f"global_step_{place.step}"
        resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder)}
    return resume | {
        "+lego.run_dir": str(place.run.root),
        "+lego.attempt": place.attempt,
        "trainer.use_v1": True,
        "trainer.device": spec.trainer.device,
        "trainer.nnodes": spec.trainer.cluster.nodes,
        "trainer.n_gpus_per_node": spec.trainer.cluster.gpus_per_node,
        "trainer.project_name": "lego-rl",
        "trainer.experiment_name": place.run_id,
        "trainer.logger": ["console", *spec.reporting.trackers],
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps,  # an epoch has at least one step
        "trainer.val_before_train": place.attempt == 1,  # a later one evaluates what is due by itself
        "trainer.val_only": spec.kind is Kind.EVAL,
        "trainer.test_freq": spec.trainer.evaluation.every or steps,
        "trainer.save_freq": checkpoint.every or steps,
        "trainer.default_local_dir": str(place.run.checkpoints),
    }


def _data(spec: RunSpec, place: Place) -> dict[str, Any]:
    return {
        "data.custom_cls.path": "pkg://trainer.verl_plugin.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": str(place.run.tasks / TRAIN / "index.jsonl"),
        "data.val_files": str(place.run.tasks / HELD_OUT / "index.jsonl"),
        "data.train_batch_size": spec.rollout.tasks_per_step,
        "data.seed": spec.trainer.seed,
        "data.shuffle": True,
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": spec.model.context,
        "data.max_response_length": spec.model.context,
    }


def _model(spec: RunSpec, place: Place) -> dict[str, Any]:
    on_cpu = spec.trainer.device == "cpu"
    model: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(place.model),
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": not on_cpu,
    }
    if on_cpu or spec.trainer.attention == "sdpa":
        model["+actor_rollout_ref.model.override_config.attn_implementation"] = "sdpa"
    return model


def _actor(spec: RunSpec) -> dict[str, Any]:
    trainer = spec.trainer
    actor = {
        "ppo_mini_batch_size": spec.rollout.tasks_per_step,  # verl's own split is not used: `lego_sync` assembles mini-batches
        "data_loader_seed": trainer.seed,
        "use_dynamic_bsz": trainer.micro_batch is None,
        "ppo_micro_batch_size_per_gpu": trainer.micro_batch,
        "ppo_max_token_len_per_gpu": max(MICRO_BATCH_TOKENS, -(-spec.model.context // trainer.parallel.sequence)),
        "optim.lr": trainer.learning_rate,
        "optim.betas": list(trainer.betas),
        "optim.weight_decay": trainer.weight_decay,
        "optim.clip_grad": trainer.grad_clip,
        "checkpoint.save_contents": ["hf_model", *(["model", "optimizer", "extra"] if trainer.checkpoint.every else [])],
    }
    scoring = {} if trainer.micro_batch is None else {f"actor_rollout_ref.{role}": trainer.micro_batch for role in SCORING}
    return (
        {f"actor_rollout_ref.actor.{key}": value for key, value in actor.items()}
        | scoring
        | {
            "algorithm.adv_estimator": "grpo",
            "algorithm.use_kl_in_reward": False,
            "critic.enable": False,
        }
    )


def _rollout(spec: RunSpec) -> dict[str, Any]:
    rollout = {
        "name": spec.rollout.engine,
        "n": spec.rollout.group_size,
        "temperature": spec.rollout.temperature,
        "max_model_len": spec.model.context,
        "max_num_seqs": 2 * spec.sandbox.concurrency,
        "seed": spec.trainer.seed,
        "calculate_log_probs": True,
        "enable_rollout_routing_replay": spec.algorithm.routing_replay,
        "agent.num_workers": 1,
    }
    return {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()} | {
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "trainer.rollout.manager.RolloutManager",
        "reward.num_workers": 0,  # rewards arrive with the rollouts
    }


def _machine(spec: RunSpec, place: Place) -> dict[str, Any]:
    rows = spec.rollout.tasks_per_step * spec.rollout.group_size * ROWS_PER_ROLLOUT
    settings = {
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": spec.trainer.cluster.nodes,
        "transfer_queue.backend.SimpleStorage.total_storage_size": rows,
        "+ray_kwargs.ray_init.address": spec.trainer.cluster.ray,
        "+ray_kwargs.ray_init.log_to_driver": False,
    }
    if spec.trainer.cluster.ray == "local":
        settings |= _own_ray(spec, place)
    else:  # its workers have the environment of their node, not ours
        variables = environment.settings(spec.trainer.device)
        settings |= {f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}": value for name, value in variables.items()}
    if place.py_executable is not None:
        settings["ray_kwargs.ray_init.runtime_env.py_executable"] = str(place.py_executable)
    return settings


def _own_ray(spec: RunSpec, place: Place) -> dict[str, Any]:
    """A cluster of the run's own, whatever else runs on the machine."""
    settings = {
        "+ray_kwargs.ray_init._temp_dir": str(place.ray_temp),
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init._node_ip_address": loopback_address(place.run_id),
    }
    if spec.trainer.device == "cuda":
        return settings | {"ray_kwargs.ray_init.num_cpus": SMALL_ACTORS + CPUS_PER_GPU * spec.trainer.cluster.gpus_per_node}
    return settings | {
        "ray_kwargs.ray_init.num_cpus": SMALL_ACTORS,
        "+ray_kwargs.ray_init.num_gpus": spec.trainer.cluster.gpus_per_node + 1,  # logical: verl counts workers in GPUs
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
    }


def loopback_address(run_id: str) -> str:
    """The address of a run's Ray cluster, inside the machine and different for every run.

    Ray replaces 127.0.0.1 by one that others can reach, but leaves the rest of the loopback network alone. A cluster's agent listens on
    port 52365; on an address of its own it does not wait for the agent of another run, or of one that is ending, to let go of it.
    """
    digest = hashlib.sha256(run_id.encode()).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def _text(value: Any) -> str:
    """A value in Hydra's override grammar, which takes plain words without quotes."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in ("true", "false", "null", "inf", "nan"):
        return value
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${") + "'"
    return json.dumps(value)
