"""The training worker, on any device and any number of ranks: verl's hybrid worker with the objectives over branches.

A batch arrives cut by rows, so the branches of a rollout may lie on different ranks, and a mini-batch may have no row on some of them.
verl averages gradients over data-parallel ranks and the loss is multiplied by their number (`Objective`): what is trained is the sum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.transferqueue_utils import BatchMeta
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.padding import response_from_nested

from trainer.engine.vllm import Probe
from trainer.learning.gspo import rollout_log_ratios
from trainer.learning.replay import ReplayCounts

from .loss import SUMS, Objective
from .ranks import Part, gathered

PROBE_TOKENS = 64
FP32_TOLERANCE = 1e-3
"""Both sides compute in fp32 on a CPU: they agree to some 1e-5 nats."""
BF16_TOLERANCE = 0.5
"""On a GPU both compute in bf16. Measured with that type on vLLM's CPU build: 0.03 to 0.06 nats on average under a mixture of experts' own
weights, 3.3 to 4.2 under another one's."""


class LegoWorker(ActorRolloutRefWorker):
    """Update batches carry, beside verl's fields, per row: `weight` (advantage times factor), `share` (|M_b| / |M(τ)|), `rollout`
    (number) and, for each epoch e, `minibatch_e` (number of its mini-batch); with a KL term `kl_weight` (coefficient times factor), with
    importance sampling `correction` (per token)."""

    actor_worker_cls = TinkerTrainingWorker
    """verl's that can pass backward without a step."""
    objective: Objective

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._seconds = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.actor is None:  # the reference of an asynchronous run is a worker of its own
            return
        actor = self.config.actor
        ratio: Literal["sequence", "token"] = "sequence" if actor.policy_loss.loss_mode == "gspo" else "token"
        self.objective = Objective(ratio, actor.clip_ratio_low, actor.clip_ratio_high)
        self.actor.set_loss_fn(self.objective)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_counts(self) -> ReplayCounts | None:
        """What this rank replayed since the last call. None where verl replays by itself (VeOmni, Megatron) and does not count."""
        replay = getattr(self.actor.engine, "replay", None)
        return None if replay is None else replay.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def arithmetic(self) -> float:
        """Seconds in passes through the model and in optimizer steps since the start."""
        return self._seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self) -> Probe | None:
        """What the present weights say of a text of random ids; None on ranks without the model's output."""
        vocabulary = self.actor.model_config.hf_config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(PROBE_TOKENS - 1, dtype=torch.long)
        row = {"prompts": ids[:1], "responses": ids[1:], "input_ids": ids, "position_ids": torch.arange(PROBE_TOKENS)}
        row |= {"response_mask": mask, "loss_mask": mask}
        data = TensorDict({name: torch.nested.as_nested_tensor([value], layout=torch.jagged) for name, value in row.items()}, batch_size=1)
        tu.assign_non_tensor(data, temperature=1.0)
        found = self._pass(self.actor, Part(data), [0], replayed=False)
        tolerance = FP32_TOLERANCE if get_device_name() == "cpu" else BF16_TOLERANCE
        return None if found is None else Probe(ids.tolist(), found["log_probs"].values()[:-1].tolist(), tolerance)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_weights(self, version: int, oldest: int) -> None:
        """Keep a copy of this rank's present weights as `version`, in host memory, and none from before `oldest`."""
        self._kept = {kept: weights for kept, weights in self._kept.items() if kept >= oldest}
        self._kept[version] = [_to_host(shard) for shard in self._shards()]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob_under(self, data: TensorDict) -> TensorDict | BatchMeta | None:
        """verl's `compute_log_prob` under the kept weights of `version`."""
        weights = self._kept[tu.pop(data, key="version")]
        present = [_to_host(shard) for shard in self._shards()]
        self._set(weights)
        try:
            return self._infer(self.actor, data, replayed=True)
        finally:
            self._set(present)
            self.routing_counts()  # what was counted is of the pass under the present weights

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict | BatchMeta | None:
        """verl's, for any number of rows."""
        return self._infer(self.actor, data, replayed=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | BatchMeta | None:
        return self._infer(self.ref, data, replayed=False)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        """One optimizer step per mini-batch and epoch; a mini-batch without rows is skipped. Returns the metrics of each step.

        Not `whole`: a part of a step; its gradients are added to those that are there, and `finish_update` makes the step.
        """
        epochs = tu.pop(data, key="epochs")
        minibatches = tu.pop(data, key="minibatches")
        whole = tu.pop(data, key="whole", default=True)
        part, steps = Part(data), list[dict[str, float] | None]()
        for epoch in range(epochs):
            places = data[f"minibatch_{epoch}"].tolist() if len(data) else []
            for number in range(minibatches):
                mine = [row for row, place in enumerate(places) if place == number]
                if (batch := part.take(mine, _micro_batch(self.actor, training=True))) is not None:
                    steps.append(self._update(batch, whole))
        self.routing_counts()  # what was counted is of the pass at the step's start
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": steps})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_update(self) -> float:
        """The optimizer's step behind the parts. Returns the norm of the gradients before they are clipped."""
        began = time.perf_counter()
        norm = self.actor.optimizer_step().get("grad_norm", 0.0)
        self._seconds += time.perf_counter() - began
        return float(norm)

    def _update(self, batch: TensorDict, whole: bool) -> dict[str, float] | None:
        if self.objective.ratio == "sequence":
            batch["log_ratio"] = self._log_ratios(batch)
        self._mark(batch, replayed=True)
        began = time.perf_counter()
        output = self.actor.train_batch(batch) if whole else self.actor.forward_backward(batch)
        self._seconds += time.perf_counter() - began
        if output is None:
            return None
        metrics = tu.get(output, "metrics")
        sums = {name: sum(chain.from_iterable(metrics[name])) for name in SUMS}  # over ranks and micro-batches
        return sums | {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}

    def _log_ratios(self, batch: TensorDict) -> torch.Tensor:
        """log σ per row under the present weights for rollouts with several branches, wherever those lie; NaN for the others (the loss
        sees all of those)."""
        share = batch["share"]
        several = ((share > 0) & (share < 1)).nonzero().squeeze(1)
        found = self._pass(self.actor, Part(batch), several.tolist(), replayed=True)
        mine: tuple[torch.Tensor, ...] | None = None
        if found is not None and len(several):
            mask = tu.index_select_tensor_dict(batch.select("response_mask", "old_log_probs"), several)
            log_probs = response_from_nested(found["log_probs"], mask["response_mask"])
            trained = mask["response_mask"].unbind()
            differences = zip(log_probs.unbind(), mask["old_log_probs"].unbind(), trained, strict=True)
            sums = torch.stack([((new - old) * of).sum() for new, old, of in differences])
            mine = sums, torch.stack([of.sum() for of in trained]), batch["rollout"][several]
        if not (parts := [part for part in gathered(mine) if part is not None]):
            return torch.full((len(batch),), float("nan"))
        of_rows, tokens, rollout = (torch.cat(column) for column in zip(*parts, strict=True))
        of_rollout = dict(zip(rollout.tolist(), rollout_log_ratios(of_rows, tokens, rollout).tolist(), strict=True))
        return torch.tensor([of_rollout.get(number, float("nan")) for number in batch["rollout"].tolist()])

    def _infer(self, worker: TrainingWorker, data: TensorDict, *, replayed: bool) -> TensorDict | BatchMeta | None:
        """Log-probs of all rows, as verl's dispatch wants them back; an empty `BatchMeta` from a rank that got none."""
        found = self._pass(worker, Part(data), range(len(data)), replayed=replayed)
        return found if found is None or len(data) else BatchMeta.empty()

    def _pass(self, worker: TrainingWorker, part: Part, rows: Sequence[int], *, replayed: bool) -> TensorDict | None:
        """What the model says of `rows`, on the host. None where no rank has one, and on ranks without the model's output."""
        batch = part.take(rows, _micro_batch(worker, training=False))
        if batch is None:
            return None
        tu.assign_non_tensor(batch, compute_loss=False)
        self._mark(batch, replayed=replayed)
        began = time.perf_counter()
        found = worker.infer_batch(batch)
        self._seconds += time.perf_counter() - began
        if found is None or len(rows) == len(batch):
            return None if found is None else found.cpu()
        return tu.index_select_tensor_dict(found.cpu(), list(range(len(rows)))) if rows else TensorDict({}, batch_size=0)

    def _mark(self, batch: TensorDict, *, replayed: bool) -> None:
        """Say what verl's own replay (VeOmni, Megatron) waits for, and that no operations are to be counted."""
        tu.assign_non_tensor(batch, global_token_num=None)
        if self.enable_routing_replay:
            tu.assign_non_tensor(batch, enable_routing_replay=replayed)

    def _shards(self) -> list[torch.Tensor]:
        """This rank's part of every parameter, where it lies now. Weights may be on their way to the host: they have arrived then."""
        get_torch_device().synchronize()
        module = self.actor.engine.module
        models = module if isinstance(module, list) else [module]  # Megatron has a list of them
        for inner in chain.from_iterable(model.modules() for model in models):
            if isinstance(inner, FSDPModule):
                inner.reshard()
        parameters = [parameter.detach() for model in models for parameter in model.parameters()]
        return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]

    @torch.no_grad()
    def _set(self, values: Sequence[torch.Tensor]) -> None:
        for shard, value in zip(self._shards(), values, strict=True):
            shard.copy_(value)


def _to_host(shard: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(shard, device="cpu").copy_(shard)


def _micro_batch(worker: TrainingWorker, *, training: bool) -> int:
    """What verl divides the number of a rank's rows by; 1 when it goes by tokens."""
    config = worker.engine_config
    if config.use_dynamic_bsz:
        return 1
    return int(config.micro_batch_size_per_gpu if training else config.infer_micro_batch_size_per_gpu)
