from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest
import verl.trainer.main_ppo
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from server.schemas.rundir import RunDir
from server.schemas.runspec import (
    Algorithm,
    Checkpoint,
    Cluster,
    Data,
    Evaluation,
    Harness,
    Model,
    Parallel,
    Rollout,
    RunSpec,
    Sandbox,
    Trainer,
)
from trainer.launch.config import Place, loopback_address, overrides

from .test_presets import ON_GPUS

RUN = RunDir(Path("/runs/it's = {a} run, 1"))
PLACE = Place(run=RUN, run_id="run-1", model=Path("/models/tiny"), ray_temp=Path("/short/ray"))

SPEC = RunSpec(
    model=Model(path="/models/tiny", context=777),
    harnesses=[Harness(name="h", version="1")],
    data=Data(family="onebug"),
    sandbox=Sandbox(concurrency=11),
    rollout=Rollout(tasks_per_step=5, group_size=7, temperature=0.9),
    algorithm=Algorithm(clip_low=0.03, clip_high=0.04, epochs=3, routing_replay=False),
    trainer=Trainer(
        steps=9,
        seed=13,
        learning_rate=2e-5,
        betas=(0.8, 0.99),
        weight_decay=0.1,
        grad_clip=0.5,
        evaluation=Evaluation(every=4),
        checkpoint=Checkpoint(every=2),
    ),
)

MEANING = {
    "algorithm.clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "algorithm.clip_low": "actor_rollout_ref.actor.clip_ratio_low",
    "algorithm.epochs": "actor_rollout_ref.actor.ppo_epochs",
    "algorithm.kl": "actor_rollout_ref.actor.kl_loss_coef",
    "algorithm.loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "algorithm.routing_replay": "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    "model.context": "actor_rollout_ref.rollout.max_model_len",
    "model.path": "actor_rollout_ref.model.path",
    "rollout.engine": "actor_rollout_ref.rollout.name",
    "rollout.group_size": "actor_rollout_ref.rollout.n",
    "rollout.tasks_per_step": "data.train_batch_size",
    "rollout.temperature": "actor_rollout_ref.rollout.temperature",
    "trainer.betas": "actor_rollout_ref.actor.optim.betas",
    "trainer.device": "trainer.device",
    "trainer.checkpoint.every": "trainer.save_freq",
    "trainer.evaluation.every": "trainer.test_freq",
    "trainer.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "trainer.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "trainer.seed": "data.seed",
    "trainer.steps": "trainer.total_training_steps",
    "trainer.weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
}
OURS = {
    "algorithm.importance_cap": "lego_sync",
    "algorithm.importance_sampling": "lego_sync",
    "algorithm.minibatches": "lego_sync's own assembly",
    "algorithm.normaliser": "row weights",
    "algorithm.ratio_base": "lego_sync",
    "rollout.harness_by": "the rollout manager",
    "rollout.routing": "the engine client",
    "rollout.max_new_tokens": "the proxy",
    "rollout.max_turns": "the proxy",
    "rollout.prompt_budget": "the proxy",
    "rollout.response_budget": "the proxy",
    "rollout.token_budget": "the proxy",
    "rollout.no_tool_call_cap": "the proxy",
    "rollout.admission": "the proxy",
    "model.renderer": "the proxy",
    "model.thinking": "the proxy",
    "trainer.checkpoint.keep": "lego_sync",
    "trainer.checkpoint.restarts": "the supervisor",
    "trainer.evaluation.harness": "the rollout manager",
    "trainer.evaluation.rollouts": "the rollout manager",
    "trainer.evaluation.temperature": "the rollout manager",
    "trainer.attention": "a choice among verl's two words",
    "trainer.start": "the launcher",
    "trainer.launcher": "the launcher",
    "trainer.cluster.jobs": "the launcher",
    "trainer.cluster.kubernetes": "the launcher",
    "trainer.schedule": "the choice of trainer",
    "trainer.staleness": "the rollout manager",
    "rollout.top_p": "refused unless off",
    "rollout.top_k": "refused unless off",
}
"""Fields of these sections that mean nothing to verl, and who reads them."""


def composed(spec: RunSpec = SPEC, place: Place = PLACE) -> DictConfig:
    """What verl's main gets: its own configuration under our overrides. An unknown key is an error of hydra."""
    config_dir = Path(verl.trainer.main_ppo.__file__).parent / "config"
    with initialize_config_dir(str(config_dir), version_base=None):
        return compose("ppo_trainer", overrides(spec, place))


def test_every_field_with_a_meaning_for_verl_arrives() -> None:
    config = composed()
    for field, key in MEANING.items():
        value: object = SPEC
        for name in field.split("."):
            value = getattr(value, name)
        found = OmegaConf.select(config, key)
        assert (list(found) if isinstance(value, tuple) else found) == (list(value) if isinstance(value, tuple) else value), field


def test_every_field_of_the_learning_sections_has_a_reader() -> None:
    fields = {
        f"{section}.{name}"
        for section in ("model", "rollout", "algorithm", "trainer")
        for name in type(getattr(SPEC, section)).model_fields
        if name not in ("evaluation", "checkpoint", "parallel", "cluster")
    }
    fields |= {f"trainer.parallel.{name}" for name in Parallel.model_fields} | {f"trainer.cluster.{name}" for name in Cluster.model_fields}
    fields |= {f"trainer.evaluation.{name}" for name in Evaluation.model_fields}
    fields |= {f"trainer.checkpoint.{name}" for name in Checkpoint.model_fields}
    assert fields == MEANING.keys() | OURS.keys() | ON_GPUS


def test_an_evaluation_comes_after_the_last_step_even_when_none_comes_between() -> None:
    spec = SPEC.model_copy(update={"trainer": Trainer(steps=9, evaluation=Evaluation(every=0))})
    assert composed(spec).trainer.test_freq == 9
    assert composed(spec).trainer.val_before_train is True


def test_paths_survive_hydras_grammar() -> None:
    config = composed()
    assert config.lego.run_dir == str(RUN.root)
    assert config.data.train_files == str(RUN.tasks / "train" / "index.jsonl")
    assert config.trainer.default_local_dir == str(RUN.checkpoints)


@pytest.mark.parametrize("name", ["true", "NULL", "nan", "inf", "1e5", "a b", "it's", "{x}", "a=b", "a,b", "[c]", "${d}", "model-3.5_b"])
def test_a_name_stays_a_name(name: str) -> None:
    assert composed(place=replace(PLACE, run_id=name)).trainer.experiment_name == name


def test_the_cluster_is_our_own_and_bound_to_loopback() -> None:
    init = composed().ray_kwargs.ray_init
    assert init.address == "local"
    assert init._node_ip_address == loopback_address("run-1")
    assert init.include_dashboard is False
    assert init.runtime_env.py_executable is None


@given(st.text())
def test_every_run_has_a_loopback_address_of_its_own(run_id: str) -> None:
    address = ip_address(loopback_address(run_id))
    assert address.is_loopback and address.packed[1] > 0 and address.packed[3] not in (0, 255)
    assert loopback_address(run_id) != loopback_address(run_id + "x")


def test_workers_are_forked_when_the_launcher_says_how() -> None:
    place = Place(RUN, "run-1", Path("/m"), Path("/short/ray"), py_executable=Path("/short/ray/python"))
    assert composed(place=place).ray_kwargs.ray_init.runtime_env.py_executable == "/short/ray/python"


@pytest.mark.parametrize("context", [256, 8192])
def test_the_longest_sequence_fits_into_a_micro_batch(context: int) -> None:
    config = composed(SPEC.model_copy(update={"model": Model(path="m", context=context)}))
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= context


def test_a_later_attempt_goes_on_from_the_checkpoint_without_the_first_evaluation() -> None:
    config = composed(place=replace(PLACE, attempt=2, step=6))
    assert (config.trainer.resume_mode, config.trainer.resume_from_path) == ("resume_path", str(RUN.checkpoints / "global_step_6"))
    assert config.trainer.val_before_train is False and config.lego.attempt == 2
    assert composed().trainer.resume_mode == "disable"


def test_an_attempt_that_begins_again_leaves_the_first_evaluation_to_the_plug_in() -> None:
    config = composed(place=replace(PLACE, attempt=2))
    assert (config.trainer.resume_mode, config.trainer.val_before_train) == ("disable", False)


def test_objectives_in_verls_words() -> None:
    modes = {}
    for loss in ("gspo", "grpo", "ppo"):
        actor = composed(SPEC.model_copy(update={"algorithm": Algorithm(loss=loss, kl=1e-3)})).actor_rollout_ref.actor
        modes[loss] = (actor.policy_loss.loss_mode, actor.loss_agg_mode)
        assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 1e-3, "low_var_kl")
    assert modes == {
        "gspo": ("gspo", "seq-mean-token-mean"),
        "grpo": ("vanilla", "seq-mean-token-mean"),
        "ppo": ("vanilla", "token-mean"),
    }
    assert composed().actor_rollout_ref.actor.use_kl_loss is False


def test_an_asynchronous_run_generates_apart_from_training() -> None:
    assert composed().trainer.v1.trainer_mode == "lego_sync" and composed().actor_rollout_ref.hybrid_engine is True
    config = composed(SPEC.model_copy(update={"trainer": Trainer(schedule="async")}))
    assert config.trainer.v1.trainer_mode == "lego_async" and config.actor_rollout_ref.hybrid_engine is False
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.checkpoint_engine.backend) == (1, 1, "object_store")
    steps = config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_optimizer_state_is_saved_only_where_a_run_can_go_on_from_it() -> None:
    contents = {every: composed(SPEC.model_copy(update={"trainer": Trainer(checkpoint=Checkpoint(every=every))})) for every in (0, 1)}
    saved = {every: set(config.actor_rollout_ref.actor.checkpoint.save_contents) for every, config in contents.items()}
    assert saved == {0: {"hf_model"}, 1: {"hf_model", "model", "optimizer", "extra"}}
