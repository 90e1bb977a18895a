"""Every shipped preset against verl's own configuration, and the paper's run row by row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import verl.trainer.main_ppo
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from server.schemas.runspec import RunSpec
from server.spec import preset_names, resolve
from trainer.launch import environment
from trainer.launch.plan import trainer_plan

BACKENDS = {
    "fsdp2": {
        "trainer.parallel.sequence": "actor.ulysses_sequence_parallel_size",
        "trainer.offload": "actor.fsdp_config.optimizer_offload",
    },
    "veomni": {
        "trainer.parallel.sequence": "actor.veomni.ulysses_parallel_size",
        "trainer.parallel.expert": "actor.veomni.expert_parallel_size",
        "trainer.offload": "actor.veomni.optimizer_offload",
    },
    "megatron": {
        "trainer.parallel.tensor": "actor.megatron.tensor_model_parallel_size",
        "trainer.parallel.expert": "actor.megatron.expert_model_parallel_size",
        "trainer.parallel.context": "actor.megatron.context_parallel_size",
        "trainer.parallel.pipeline": "actor.megatron.pipeline_model_parallel_size",
        "trainer.offload": "actor.megatron.optimizer_offload",
    },
}
"""RunSpec field → key below `actor_rollout_ref`, for each backend."""
COMMON = {
    "trainer.backend": "actor_rollout_ref.actor.strategy",
    "trainer.micro_batch": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "trainer.cluster.nodes": "trainer.nnodes",
    "trainer.cluster.gpus_per_node": "trainer.n_gpus_per_node",
    "trainer.cluster.rollout_nodes": "actor_rollout_ref.rollout.nnodes",
    "trainer.cluster.ray": "ray_kwargs.ray_init.address",
    "rollout.tensor_parallel": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "rollout.gpu_memory": "actor_rollout_ref.rollout.gpu_memory_utilization",
}
ON_ONE_GPU = {"trainer.device": "cuda", "rollout.engine": "vllm", "trainer.start": "plain"}
ON_GPUS = COMMON.keys() | {field for keys in BACKENDS.values() for field in keys}
UNUSUAL = {
    "trainer.micro_batch": 3,
    "trainer.offload": True,
    "trainer.cluster": {"nodes": 4, "gpus_per_node": 6, "rollout_nodes": 5, "ray": "head:6379"},
    "rollout.tensor_parallel": 3,
    "rollout.gpu_memory": 0.61,
    "trainer.schedule": "async",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_field_for_gpus_arrives(backend: str) -> None:
    keys = COMMON | {field: f"actor_rollout_ref.{key}" for field, key in BACKENDS[backend].items()}
    parallel = {field: 2 for field in keys if field.startswith("trainer.parallel.")}
    own = UNUSUAL | {"trainer.parallel.sequence": 1, "trainer.backend": backend}
    spec = resolve({"extends": "single-node"}, own | parallel).spec
    config = composed(spec)
    for field, key in keys.items():
        section, _, name = field.rpartition(".")
        holder: object = spec
        for part in section.split("."):
            holder = getattr(holder, part)
        assert OmegaConf.select(config, key) == getattr(holder, name), field


def spec_of(preset: str) -> RunSpec:
    return resolve({"extends": preset}).spec


def composed(spec: RunSpec) -> DictConfig:
    with initialize_config_dir(str(Path(verl.trainer.main_ppo.__file__).parent / "config"), version_base=None):
        return compose("ppo_trainer", trainer_plan(spec).command[3:])


@pytest.mark.parametrize("preset", preset_names())
def test_a_crash_loses_the_step_under_way_and_no_more(preset: str) -> None:
    checkpoint = spec_of(preset).trainer.checkpoint
    assert checkpoint.every == 1 and checkpoint.keep == 2, "two and the best one are kept, whatever the length of the run"


@pytest.mark.parametrize("preset", preset_names())
def test_verl_takes_every_preset(preset: str) -> None:
    """An unknown key is an error of Hydra; verl's dataclasses check types and combinations."""
    spec = spec_of(preset)
    config = composed(spec)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (actor.strategy, rollout.name) == (spec.trainer.backend, spec.rollout.engine)
    assert (rollout.n, rollout.tensor_model_parallel_size) == (spec.rollout.group_size, spec.rollout.tensor_parallel)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (spec.trainer.cluster.nodes, spec.trainer.cluster.gpus_per_node)
    validate_config(config, need_reference_policy(config), need_critic(config))  # the first thing that verl's main does


def test_the_papers_run_has_every_row_of_its_table_10() -> None:
    spec = spec_of("paper-qwen3.5-35b")
    config = composed(spec)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    table = {
        "policy loss": (actor.policy_loss.loss_mode, "gspo"),
        "clip range": ((actor.clip_ratio_low, actor.clip_ratio_high), (3e-4, 4e-4)),
        "advantage estimator": (config.algorithm.adv_estimator, "grpo"),
        "loss aggregation": (actor.loss_agg_mode, "seq-mean-token-mean"),
        "KL reward penalty": (config.algorithm.use_kl_in_reward, False),
        "KL loss coefficient": ((actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type), (True, 1e-3, "low_var_kl")),
        "staleness threshold": ((config.trainer.v1.trainer_mode, spec.trainer.staleness), ("lego_async", 1)),
        "importance-sampling correction": (spec.algorithm.importance_sampling, "off"),
        "learning rate": (actor.optim.lr, 1e-6),
        "learning-rate schedule": (actor.optim.lr_scheduler_type, "constant"),
        "gradient clip": (actor.optim.clip_grad, 1.0),
        "prompts per batch": (config.data.train_batch_size, 64),
        "rollouts per prompt": (rollout.n, 8),
        "micro-batch per GPU": (actor.ppo_micro_batch_size_per_gpu, 1),
        "rollout temperature": (rollout.temperature, 1.0),
        "rollout top-p": (rollout.top_p, 1),
        "validation temperature": (spec.trainer.evaluation.temperature, 0.7),
        "validation samples per instance": (spec.trainer.evaluation.rollouts, 500),  # SWE-bench Verified has 500
        "prompt budget": (spec.rollout.prompt_budget, 30_000),
        "response budget": (spec.rollout.response_budget, 170_000),
        "epochs over 2,699 tasks": (spec.trainer.steps, 3 * (2699 // 64)),
    }
    assert {row: found for row, (found, _) in table.items()} == {row: wanted for row, (_, wanted) in table.items()}


def test_the_papers_run_is_laid_out_over_three_nodes() -> None:
    config = composed(spec_of("paper-qwen3.5-35b"))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node, config.actor_rollout_ref.hybrid_engine) == (1, 8, False)
    assert rollout.checkpoint_engine.backend == "nccl"
    veomni = config.actor_rollout_ref.actor.veomni
    assert (veomni.ulysses_parallel_size, veomni.router_replay.mode) == (8, "R3")


def test_passes_without_a_gradient_have_the_micro_batch_of_those_with_one() -> None:
    policy = composed(spec_of("paper-qwen3.5-35b")).actor_rollout_ref
    assert (policy.rollout.log_prob_micro_batch_size_per_gpu, policy.ref.log_prob_micro_batch_size_per_gpu) == (1, 1)


@pytest.mark.parametrize(("attention", "named"), [("flash", None), ("sdpa", "sdpa")])
def test_attention_is_verls_own_choice_or_pytorchs(attention: str, named: str | None) -> None:
    spec = resolve({"extends": "single-node"}, {"trainer.attention": attention, "trainer.parallel.sequence": 1}).spec
    assert composed(spec).actor_rollout_ref.model.override_config.get("attn_implementation") == named


def test_a_cluster_of_the_runs_own_has_its_machines_gpus_and_room_for_verls_small_actors() -> None:
    init = composed(spec_of("single-node")).ray_kwargs.ray_init
    assert "num_gpus" not in init and init.num_cpus >= 8 * 3 + 8  # the place of a GPU reserves three
    assert environment.settings("cuda")["VERL_PLATFORM"] == "nvidia" and environment.settings("cpu")["VERL_PLATFORM"] == "cpu"


def test_megatron_splits_by_tensor_expert_and_context() -> None:
    megatron = composed(spec_of("megatron")).actor_rollout_ref.actor.megatron
    split = (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size, megatron.context_parallel_size)
    assert split == (2, 8, 4)
    assert megatron.router_replay.mode == "R3"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer.backend": "veomni"}, "trainer.device cpu trains on one machine with backend fsdp2"),
        ({"trainer.cluster.gpus_per_node": 2, "trainer.parallel.sequence": 2}, "without flash attention no sequence can be split"),
        ({"rollout.engine": "vllm", "trainer.start": "plain", "trainer.cluster.gpus_per_node": 2}, "and gpus_per_node: 1"),
        ({"trainer.device": "cuda"}, "rollout.engine cpu does not go with trainer.device cuda: use vllm"),
        ({"rollout.engine": "vllm", "trainer.start": "warm_fork"}, "use start: plain, tensor_parallel: 1"),
        ({"trainer.device": "cuda", "rollout.engine": "vllm", "trainer.parallel.tensor": 2}, "fsdp2 splits by sequence only"),
        ({"trainer.device": "cuda", "rollout.engine": "vllm", "trainer.parallel.sequence": 3}, "does not divide the 1 of trainer.cluster"),
        ({"trainer.device": "cuda", "rollout.engine": "vllm", "trainer.schedule": "async"}, "async generates on nodes of its own"),
        ({"trainer.cluster.nodes": 2}, "a Ray cluster of the run's own has one node"),
        ({"trainer.device": "cuda", "rollout.engine": "vllm"}, "use start: plain with device cuda"),
        (ON_ONE_GPU | {"trainer.attention": "sdpa", "trainer.backend": "veomni"}, "sdpa goes with backend fsdp2 and whole sequences"),
        (ON_ONE_GPU | {"rollout.tensor_parallel": 2}, "rollout.tensor_parallel 2: 1 nodes of 1 GPUs cannot be shared out"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        resolve({"extends": "local"}, overrides)


def test_a_run_on_a_cpu_may_have_several_ranks() -> None:
    config = composed(resolve({"extends": "local"}, {"trainer.cluster.gpus_per_node": 3}).spec)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_kwargs.ray_init.num_gpus) == (1, 3, 4)


def test_the_plan_is_a_shell_command_that_verl_reads_back() -> None:
    plan = trainer_plan(spec_of("local"))
    shell = "\n".join(plan.lines()).replace(
        "python -m verl.trainer.main_ppo", f"{sys.executable} -c 'import json,sys; print(json.dumps(sys.argv))'"
    )
    argv = json.loads(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout)
    assert argv[1:] == plan.command[3:]
