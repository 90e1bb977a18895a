"""What our trainers add to verl's: exclusion of failed trials, exact normalisation, a fixed number of optimizer steps, evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.workers.utils.padding import response_from_nested

from server.schemas.events import EvaluationBody
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import BestFile, CheckpointFile, RunDir, write_atomic
from server.schemas.runspec import Kind
from trainer.checkpoints.kept import forget_after, is_best, name_best, prune, weights
from trainer.engine.base import EngineError, EngineGone
from trainer.engine.vllm import Probe
from trainer.launch import PROGRESS_LOG, FinalError
from trainer.rollout.manager import Batch, RolloutManager, parts_of_a_step
from trainer.rollout.rows import PARTITION

from .metrics import LogProbs, ReportingSink, disagreement, fidelity_metrics, numbers, routing_metrics, update_metrics
from .parts import Compared, StepSoFar, one_update, together, verls_own
from .ranks import spread
from .update import StepUpdate, harness_metrics, plan_update, row_owners
from .worker import LegoWorker
from .worker_cpu import CpuWorker

NO_ROW = "no-row"
"""Stands for the rows of a step that has none: verl clears a step's rows behind it, and an empty list is an error there."""


class LegoSteps(PPOTrainer):
    """Stands in front of one of verl's trainers, which says how generation and training share the machine."""

    agent_loop_manager: RolloutManager

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trainer_mode = "sync"  # under every other name verl keeps the prompts and saves them; here the manager does
        self._run = RunDir(Path(config.lego.run_dir))
        self._spec = self._run.load().spec
        self._arithmetic = 0.0
        self._ours: dict[str, float] = {}
        """Seconds of the step under way in what verl alone would not do."""
        self._disagreed = False
        """Whether engine and trainer did, further than allowed: it is said once."""
        self._first_difference = math.nan
        """Mean |trainer - engine| log-probability of the first step, in nats."""
        self._metrics: dict[str, float] = {}
        """Of the step under way."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        worker = CpuWorker if self.config.trainer.device == "cpu" else LegoWorker
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(worker)

    def fit(self, agent_loop_manager: RolloutManager) -> None:
        self.agent_loop_manager = agent_loop_manager
        evaluated = agent_loop_manager.begin(self.global_steps)
        forget_after(self._run, self.global_steps)
        try:
            if not evaluated:
                self._validate()
            if self.global_steps:
                agent_loop_manager.feed(CheckpointFile.model_validate_json(self._run.latest_checkpoint.read_bytes()).unfinished)
            super().fit(agent_loop_manager)
        finally:
            agent_loop_manager.close()

    def on_train_begin(self) -> None:
        """The record comes first: whatever a tracker does with a step, it is stored."""
        ours = ReportingSink(self.agent_loop_manager.reporter, self._say, self.total_training_steps)
        self.logger.logger = {"lego": ours, **self.logger.logger}

    def _probe(self) -> Probe | None:
        """What the present weights say, for `_admit`; asked for before they are sent, because an engine on the same GPUs then takes the
        memory that the model's pass needs."""
        if self._spec.rollout.engine != "vllm":
            return None
        return next(probe for probe in self.actor_rollout_wg.probe() if probe is not None)

    def _admit(self, replicas: Sequence[Any], probe: Probe | None) -> None:
        """vLLM takes some weights as silent garbage: it serves new ones only after it was compared with the trainer. FinalError: it is not
        the same model."""
        if probe is not None:
            try:
                ray.get([replica.servers[0].admit.remote(probe) for replica in replicas])
            except EngineGone:
                raise
            except EngineError as error:
                raise FinalError(str(error).strip().splitlines()[-1]) from error

    def prepare_step(self) -> dict[str, Any]:
        with marked_timer("ours", self._ours):
            self._feed(self.total_training_steps - self.global_steps + 1)
        return {}

    def _feed(self, batches: int) -> None:
        """Give the schedule what it wants when `batches` are still to be taken; the order of the data is verl's."""
        if wanted := self.agent_loop_manager.wanted(batches):
            self.agent_loop_manager.generate_sequences(self._next_train_batch(wanted))

    def on_step_end(self) -> None:
        self.agent_loop_manager.announce(self.global_steps)
        super().on_step_end()
        with marked_timer("ours", self._ours):
            self.agent_loop_manager.advance(self.global_steps)

    def _validate(self) -> dict[str, float]:
        """A held-out evaluation: the same path as training, without an update."""
        started = time.monotonic()
        played = self.agent_loop_manager.evaluate(self.global_steps)
        rollouts = [rollout for group in played for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        seconds = time.monotonic() - started
        metrics = {"timing_s/evaluation": seconds, "lego/turns/mean": sum(r.turns for r in rollouts) / len(rollouts)}
        metrics |= harness_metrics(played)
        self._keep_best(sum(rewards), len(rollouts))  # first: a reported evaluation is not made again
        self.agent_loop_manager.reporter.report(
            EvaluationBody(step=self.global_steps, resolved=sum(rewards), executed=len(rewards), total=len(rollouts), metrics=metrics)
        )
        self._say(
            f"evaluation after step {self.global_steps}: {sum(rewards)} of {len(rollouts)} resolved"
            f"  {len(rollouts) - len(rewards)} failed  {seconds:.1f} s"
        )
        return {"val-core/lego/resolved": sum(rewards) / len(rollouts), "timing_s/evaluation": seconds}

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        """A batch, or its parts as their rollouts end. The weights change once, behind the last part."""
        step = StepSoFar()
        while not step.complete:
            with marked_timer("gen", timing_raw):
                self.on_sample_begin()
                step.parts.append(self.agent_loop_manager.take())
                self.on_sample_end()
            self._train_part(step, metrics, timing_raw)
        if len(step.parts) > 1 and step.updates:
            with marked_timer("update_actor", timing_raw):
                step.updates = [one_update(step.updates, self.actor_rollout_wg.finish_update()[0])]
        whole = step.whole()
        with marked_timer("ours", self._ours):
            metrics.update(self._plan(whole).metrics | {"lego/schedule/parts": float(len(step.parts))})
            metrics.update(self.agent_loop_manager.metrics())
            metrics.update(update_metrics(step.updates) if step.updates else {"lego/optimizer_steps": 0.0})
            if step.scored:
                compared = together(step.scored)
                if len(step.scored) > 1:
                    metrics.update(verls_own(compared))
                self._report_fidelity(compared, metrics)
        before, self._arithmetic = self._arithmetic, max(self.actor_rollout_wg.arithmetic())
        timing_raw["arithmetic"] = self._arithmetic - before
        timing_raw["ours"] = self._ours.pop("ours")
        if not whole.rows.keys:
            tq.kv_put(key=NO_ROW, partition_id=PARTITION, tag={"global_steps": self.global_steps})
        return KVBatchMeta(partition_id=PARTITION, keys=whole.rows.keys or [NO_ROW], tags=whole.rows.tags or [{}])

    def _train_part(self, step: StepSoFar, metrics: dict[str, Any], timing_raw: dict[str, float]) -> None:
        """Score the newest part and pass forward and backward over it; behind a whole batch the optimizer makes its steps."""
        part = step.parts[-1]
        with marked_timer("ours", self._ours):
            update = self._plan(part)
        batch = KVBatchMeta(partition_id=PARTITION, keys=part.rows.keys, tags=part.rows.tags)
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        if batch.keys:
            with marked_timer("old_log_prob", timing_raw):
                batch, compared = self._score(batch, part, metrics)
            step.scored.append(compared)
        if update.rows:
            with marked_timer("update_actor", timing_raw):
                step.updates += self._update_branches(batch, update, whole=part.complete and len(step.parts) == 1)

    def _plan(self, part: Batch) -> StepUpdate:
        seed = self._spec.trainer.seed * 100_003 + self.global_steps
        groups = self._spec.rollout.tasks_per_step if parts_of_a_step(self._spec) > 1 else None
        return plan_update(part.played, self._spec.algorithm, seed, version=self.global_steps - 1, stale=part.stale, groups=groups)

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
        write_atomic(weights(self._run, self.global_steps) / TRAINED_WITH, trained_with.model_dump_json(), mode=0o644)
        if checkpoint.every:
            latest = self.agent_loop_manager.checkpoint(self.global_steps, self._metrics)
            write_atomic(self._run.latest_checkpoint, latest.model_dump_json())
        prune(self._run, checkpoint.keep)

    def _keep_best(self, resolved: int, total: int) -> None:
        """Name the present weights the best ones when they are; they are saved when they were not yet."""
        step = self.global_steps
        if self._spec.kind is not Kind.TRAIN or step == 0 or not is_best(self._run, resolved, total):
            return
        if not weights(self._run, step).is_dir():
            self._save_checkpoint()
        name_best(self._run, BestFile(step=step, resolved=resolved, total=total))

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        self._metrics = numbers(metrics)
        return batch

    def _score(self, batch: KVBatchMeta, taken: Batch, metrics: dict[str, Any]) -> tuple[KVBatchMeta, Compared]:
        """The trainer's log-probabilities at the step's start: fidelity against the rollout in any case, and the ratio's base when
        `ratio_base` is `recomputed`; otherwise the captured ones take their place afterwards. With a KL term, the reference's too."""
        batch.reorder(spread([tag["seq_len"] for tag in batch.tags], [0] * len(batch), self._spec.trainer.copies))
        batch = PPOTrainer._compute_old_log_prob(self, batch, metrics)
        with marked_timer("ours", self._ours):
            data, compared = self._compare(batch, taken, metrics["actor/entropy"])
        if self.use_reference_policy:
            batch = self._compute_ref_log_prob(batch, metrics)
        algorithm = self._spec.algorithm
        if algorithm.ratio_base == "behaviour":
            return self._put(batch, {"old_log_probs": data["rollout_log_probs"]}), compared
        if algorithm.importance_sampling == "token":
            padded = data.to_padded_tensor()
            weights, found = compute_rollout_correction_weights(
                padded["old_log_probs"] - padded["rollout_log_probs"],
                padded["response_mask"],
                rollout_is="token",
                rollout_is_threshold=algorithm.importance_cap,
            )
            metrics.update({f"rollout_corr/{name}": value for name, value in found.items()})
            lengths = data["response_mask"].offsets().diff().tolist()
            rows = [row[:length] for row, length in zip(weights, lengths, strict=True)]
            return self._put(batch, {"correction": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}), compared
        return batch, compared

    def _compare(self, batch: KVBatchMeta, taken: Batch, entropy: float) -> tuple[TensorDict, Compared]:
        """Log-probabilities and mask of the scored batch, and what fidelity is measured on."""
        names = ["rollout_log_probs", "old_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        rollout, trainer, mask = (data[name].values().float().numpy() for name in names)  # a GPU's may be bf16, which numpy has not
        owners = row_owners(batch.keys, taken.played)
        replayed = [counts for counts in self.actor_rollout_wg.routing_counts() if counts is not None]
        columns = LogProbs(rollout, trainer, mask, data["response_mask"].offsets().numpy(), owners.versions, self.global_steps - 1)
        if self._spec.monitors.lagged_fidelity:
            columns = columns._replace(sampler=self._under_their_weights(batch, columns))
        return data, Compared(columns, owners, replayed, entropy)

    def _report_fidelity(self, compared: Compared, metrics: dict[str, Any]) -> None:
        metrics.update(fidelity_metrics(compared.columns, compared.owners.harnesses, compared.owners.rollouts))
        metrics.update(routing_metrics(compared.replayed))
        monitors, rate = self._spec.monitors, self._spec.trainer.learning_rate
        if math.isnan(self._first_difference):
            self._first_difference = metrics["lego/fidelity/mean_abs"]
        if not self._disagreed and (finding := disagreement(metrics, monitors.pearson, rate, self.global_steps, self._first_difference)):
            self._disagreed = True
            self.agent_loop_manager.reporter.report(finding)

    def _under_their_weights(self, batch: KVBatchMeta, columns: LogProbs) -> NDArray[np.float32]:
        """`columns.trainer`, with the tokens of older weights computed again under those."""
        answer, rows = columns.trainer.copy(), np.repeat(np.arange(len(batch)), np.diff(columns.offsets))
        for version in np.unique(columns.versions[columns.lagged]).tolist():
            chosen = columns.lagged & (columns.versions == version)
            numbers = np.unique(rows[chosen])
            part = KVBatchMeta(
                partition_id=batch.partition_id, keys=[batch.keys[n] for n in numbers], tags=[batch.tags[n] for n in numbers]
            )
            part.extra_info = {"version": version, "temperature": self._spec.rollout.temperature, "compute_loss": False}
            self.actor_rollout_wg.compute_log_prob_under(part)
            data = tq.kv_batch_get(keys=part.keys, partition_id=part.partition_id, select_fields=["log_probs", "response_mask"])
            found = response_from_nested(data["log_probs"], data["response_mask"]).values().numpy()
            answer[chosen] = found[chosen[np.isin(rows, numbers)]]
        return answer

    def _put(self, batch: KVBatchMeta, columns: dict[str, torch.Tensor]) -> KVBatchMeta:
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(columns, batch_size=len(batch)))

    def _update_branches(self, batch: KVBatchMeta, update: StepUpdate, *, whole: bool) -> list[dict[str, float]]:
        """Train the rows with signal: epochs x mini-batches optimizer steps, whatever their number. Of a part: add to the gradients."""
        algorithm, length = self._spec.algorithm, dict(zip(batch.keys, (tag["seq_len"] for tag in batch.tags), strict=True))
        places = [row.minibatches[0] for row in update.rows]
        rows = [update.rows[n] for n in spread([length[row.key] for row in update.rows], places, self._spec.trainer.copies)]
        columns = {
            "weight": torch.tensor([row.weight for row in rows], dtype=torch.float32),
            "share": torch.tensor([row.share for row in rows], dtype=torch.float32),
            "rollout": torch.tensor([row.rollout for row in rows]),
        }
        if algorithm.kl:
            columns["kl_weight"] = torch.tensor([algorithm.kl * row.factor for row in rows], dtype=torch.float32)
        columns |= {f"minibatch_{epoch}": torch.tensor([row.minibatches[epoch] for row in rows]) for epoch in range(algorithm.epochs)}
        trained = tq.kv_batch_put(
            keys=[row.key for row in rows], partition_id=batch.partition_id, fields=TensorDict(columns, batch_size=len(rows))
        )
        trained.extra_info = {
            "epochs": algorithm.epochs,
            "minibatches": algorithm.minibatches,
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            "calculate_entropy": False,
            "global_batch_size": 1,
            "whole": whole,
        }
        steps: list[dict[str, float]] = tu.get(self.actor_rollout_wg.update_actor(trained), "metrics")
        return steps

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
