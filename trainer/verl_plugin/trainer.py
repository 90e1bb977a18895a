"""`lego_sync`: verl's synchronous trainer with exclusion of failed trials, exact normalisation and a fixed number of optimizer steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from server.schemas.events import EvaluationBody
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import CheckpointFile, RunDir, write_atomic
from trainer.launch import PROGRESS_LOG
from trainer.rollout.manager import PlayedGroup, RolloutManager

from .metrics import LogProbs, ReportingSink, fidelity_metrics, numbers, update_metrics
from .stop import check_failures
from .update import StepUpdate, harness_metrics, left_rows, plan_update, row_owners
from .worker import CpuWorker


@register_trainer("lego_sync")
class LegoSync(PPOTrainerSync):
    agent_loop_manager: RolloutManager

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trainer_mode = "sync"  # verl takes every other name for an asynchronous trainer
        self.replay_buffer = self._build_replay_buffer()
        self._run = RunDir(Path(config.lego.run_dir))
        self._spec = self._run.load().spec
        self._metrics: dict[str, float] = {}
        """Of the step under way."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CpuWorker)

    def fit(self, agent_loop_manager: RolloutManager) -> None:
        self.agent_loop_manager = agent_loop_manager
        evaluated = agent_loop_manager.begin(self.global_steps)
        try:
            if not evaluated:
                self._validate()
            super().fit(agent_loop_manager)
        finally:
            agent_loop_manager.close()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self.logger.logger["lego"] = ReportingSink(self.agent_loop_manager.reporter, self._say, self.total_training_steps)

    def _validate(self) -> dict[str, float]:
        """A held-out evaluation: the same path as training, without an update."""
        started = time.monotonic()
        played = self.agent_loop_manager.evaluate(self.global_steps)
        check_failures(played, f"the evaluation after step {self.global_steps}", self._spec.monitors.failed_share)
        rollouts = [rollout for group in played for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        seconds = time.monotonic() - started
        metrics = {"timing_s/evaluation": seconds, "lego/turns/mean": sum(r.turns for r in rollouts) / len(rollouts)}
        metrics |= harness_metrics(played)
        self.agent_loop_manager.reporter.report(
            EvaluationBody(step=self.global_steps, resolved=sum(rewards), executed=len(rewards), total=len(rollouts), metrics=metrics)
        )
        self._say(
            f"evaluation after step {self.global_steps}: {sum(rewards)} of {len(rollouts)} resolved"
            f"  {len(rollouts) - len(rewards)} failed  {seconds:.1f} s"
        )
        return {"val-core/lego/resolved": sum(rewards) / len(rollouts), "timing_s/evaluation": seconds}

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        with marked_timer("gen", timing_raw):
            self.on_sample_begin()
            played = self.agent_loop_manager.finish_step()
            check_failures(played, f"step {self.global_steps}", self._spec.monitors.failed_share)
            batch = self._sample(played, sample_batch_size)
            self.on_sample_end()
        algorithm = self._spec.algorithm
        update = plan_update(
            played,
            normaliser=algorithm.normaliser,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            seed=self._spec.trainer.seed * 100_003 + self.global_steps,
        )
        metrics.update(update.metrics)
        metrics.update(self.agent_loop_manager.proxy_metrics())
        if batch.extra_info:
            with marked_timer("old_log_prob", timing_raw):
                batch = self._score(batch, played, metrics)
        if update.rows:
            with marked_timer("update_actor", timing_raw):
                self._update_branches(batch, update, metrics)
        metrics.setdefault("lego/optimizer_steps", 0.0)
        return batch

    def _save_checkpoint(self) -> None:
        """verl's, then the file that names it (verl's own is not written atomically), then the oldest ones go (verl forgets those of an
        earlier attempt)."""
        super()._save_checkpoint()
        spec, checkpoint = self._spec, self._spec.trainer.checkpoint
        trained_with = TrainedWith(
            renderer=spec.model.renderer,
            thinking=spec.model.thinking,
            history=spec.capture.history,
            harnesses=[harness.name for harness in spec.harnesses],
            run_id=self.config.trainer.experiment_name,
            step=self.global_steps,
        )
        weights = self._run.checkpoints / f"global_step_{self.global_steps}" / "actor" / "huggingface"
        write_atomic(weights / TRAINED_WITH, trained_with.model_dump_json(), mode=0o644)
        if checkpoint.every:
            latest = CheckpointFile(step=self.global_steps, metrics=self._metrics)
            write_atomic(self._run.latest_checkpoint, latest.model_dump_json())
            folders = sorted(self._run.checkpoints.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
            for folder in folders[: -checkpoint.keep]:
                shutil.rmtree(folder)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        self._metrics = numbers(metrics)
        return batch

    def _sample(self, played: Sequence[PlayedGroup], groups: int) -> KVBatchMeta:
        """The step's rows; when no trial left one, a batch of the prompts alone, which verl clears at the end of the step."""
        uids = list(dict.fromkeys(group.group.uid for group in played))
        if not left_rows(played):
            return KVBatchMeta(partition_id="train", keys=uids, tags=[{"is_prompt": True} for _ in uids])
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="train", batch_size=groups)
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def _score(self, batch: KVBatchMeta, played: Sequence[PlayedGroup], metrics: dict[str, Any]) -> KVBatchMeta:
        """The trainer's log-probabilities at the step's start: fidelity against the rollout in any case, and the ratio's base when
        `ratio_base` is `recomputed`; otherwise the captured ones take their place afterwards."""
        batch = self._compute_old_log_prob(batch, metrics)
        names = ["rollout_log_probs", "old_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        rollout, trainer, mask = (data[name].values().numpy() for name in names)
        columns = LogProbs(rollout, trainer, mask, data["response_mask"].offsets().numpy())
        metrics.update(fidelity_metrics(columns, *row_owners(batch.keys, played)))
        metrics.update(self.actor_rollout_wg.routing_counts()[0])
        if self._spec.algorithm.ratio_base == "behaviour":
            captured = TensorDict({"old_log_probs": data["rollout_log_probs"]}, batch_size=len(batch))
            batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=captured)
        return batch

    def _update_branches(self, batch: KVBatchMeta, update: StepUpdate, metrics: dict[str, Any]) -> None:
        """Train the rows with signal: epochs x mini-batches optimizer steps, whatever their number."""
        rows = update.rows
        columns = {
            "weight": torch.tensor([row.weight for row in rows], dtype=torch.float32),
            "share": torch.tensor([row.share for row in rows], dtype=torch.float32),
            "rollout": torch.tensor([row.rollout for row in rows]),
        }
        epochs, minibatches = self._spec.algorithm.epochs, self._spec.algorithm.minibatches
        columns |= {f"minibatch_{epoch}": torch.tensor([row.minibatches[epoch] for row in rows]) for epoch in range(epochs)}
        trained = tq.kv_batch_put(
            keys=[row.key for row in rows], partition_id=batch.partition_id, fields=TensorDict(columns, batch_size=len(rows))
        )
        trained.extra_info = {
            "epochs": epochs,
            "minibatches": minibatches,
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            "calculate_entropy": False,
            "global_batch_size": 1,
        }
        output = self.actor_rollout_wg.update_actor(trained)
        metrics.update(update_metrics(tu.get(output, "metrics")))

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        lengths = [tag["seq_len"] for tag in batch.tags if "seq_len" in tag]
        if lengths:
            metrics |= {"lego/sequence_length/mean": sum(lengths) / len(lengths), "lego/sequence_length/max": max(lengths)}
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
        metrics |= {"training/global_step": global_steps, "training/epoch": epoch}

    def _say(self, line: str) -> None:
        with (self._run.logs / PROGRESS_LOG).open("a") as file:
            file.write(line + "\n")
