"""The training worker on a CPU: verl's hybrid worker with gloo, one thread, the objectives over branches, and for a synchronous trainer the
rollout engine inside. There generation and training share this process and its event loop: they never overlap.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from trainer.engine.vllm import Probe
from trainer.learning.gspo import rollout_log_ratios

from .loss import SUMS, Objective

PROBE_TOKENS, PROBE_TOLERANCE = 64, 1e-3
"""Both sides compute in fp32 on a CPU: they agree to some 1e-5 nats."""


class LegoWorker(ActorRolloutRefWorker):
    """Update batches carry, beside verl's fields, per row: `weight` (advantage times factor), `share` (|M_b| / |M(τ)|), `rollout`
    (number) and, for each epoch e, `minibatch_e` (number of its mini-batch); with a KL term `kl_weight` (coefficient times factor), with
    importance sampling `correction` (per token)."""

    objective: Objective

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept: dict[int, list[torch.Tensor]] = {}
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():  # verl would ask for "cpu:gloo,cpu:gloo", which torch rejects
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        actor = self.config.actor
        ratio: Literal["sequence", "token"] = "sequence" if actor.policy_loss.loss_mode == "gspo" else "token"
        self.objective = Objective(ratio, actor.clip_ratio_low, actor.clip_ratio_high)
        self.actor.set_loss_fn(self.objective)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def engine_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call to the rollout server in this process. No `torch.no_grad()` here: across an await it leaks into training."""
        return await getattr(self.rollout.server, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def routing_counts(self) -> dict[str, float]:
        """Since the last call: (token, layer) rows that were replayed, those of them that would have gone elsewhere by themselves, and how
        far the trainer's own router agrees with the recorded experts."""
        counts = self.actor.engine.replay.take()
        metrics = {"lego/routing/replayed": float(counts.replayed), "lego/routing/changed": float(counts.changed)}
        return metrics | ({"lego/routing/overlap": counts.overlap, "lego/routing/top1": counts.top1} if counts.replayed else {})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def arithmetic(self) -> float:
        """Seconds in passes through the model since the start."""
        return self.actor.engine.seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self) -> Probe:
        """What the present weights say of a text of random ids."""
        engine = self.actor.engine
        ids = torch.randint(engine.module.config.vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        with engine.eval_mode(), torch.no_grad():
            engine.replay.load(None)
            log_probs = engine.module(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return Probe(ids.tolist(), log_probs.gather(1, ids[1:, None])[:, 0].tolist(), PROBE_TOLERANCE)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_weights(self, version: int, oldest: int) -> None:
        """Keep a copy of the present weights as `version`, and none from before `oldest`."""
        self._kept = {kept: weights for kept, weights in self._kept.items() if kept >= oldest}
        self._kept[version] = [parameter.detach().clone() for parameter in self.actor.engine.module.parameters()]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob_under(self, data: TensorDict) -> TensorDict:
        """verl's `compute_log_prob` under the kept weights of `version`."""
        parameters = list(self.actor.engine.module.parameters())
        present = [parameter.detach().clone() for parameter in parameters]
        _copy(self._kept[tu.pop(data, key="version")], parameters)
        try:
            return self.actor.infer_batch(data).cpu()
        finally:
            _copy(present, parameters)
            self.actor.engine.replay.take()  # the counts are those of the pass under the present weights

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        """One optimizer step per mini-batch and epoch; a mini-batch without rows is skipped. Returns the metrics of each step."""
        epochs = tu.pop(data, key="epochs")
        minibatches = tu.pop(data, key="minibatches")
        steps: list[dict[str, float]] = []
        for epoch in range(epochs):
            for number in range(minibatches):
                rows = (data[f"minibatch_{epoch}"] == number).nonzero().squeeze(1)
                if len(rows):
                    steps.append(self._optimizer_step(tu.index_select_tensor_dict(data, rows)))
        self.actor.engine.replay.take()  # the counts are those of the pass at the step's start
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": steps})

    def _optimizer_step(self, batch: TensorDict) -> dict[str, float]:
        if self.objective.ratio == "sequence":
            batch["log_ratio"] = self._log_ratios(batch)
        lengths = NonTensorData(batch["input_ids"].offsets().diff().tolist())
        tu.assign_non_tensor(batch, global_token_num=lengths, disable_auto_offload=False)
        metrics = tu.get(self.actor.train_batch(batch), "metrics")
        sums = {name: sum(chain.from_iterable(metrics[name])) for name in SUMS}  # over ranks and micro-batches
        return sums | {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}

    def _log_ratios(self, batch: TensorDict) -> torch.Tensor:
        """log σ per row under the present weights for rollouts with several branches, NaN for the others (the loss sees all of those)."""
        rollout = batch["rollout"]
        _, owner, count = rollout.unique(return_inverse=True, return_counts=True)
        several = (count[owner] > 1).nonzero().squeeze(1)
        log_ratios = torch.full((len(rollout),), float("nan"))
        if len(several):
            rows = tu.index_select_tensor_dict(batch, several)
            tu.assign_non_tensor(rows, compute_loss=False, calculate_entropy=False, global_token_num=None)
            mask = rows["response_mask"]
            log_probs = response_from_nested(tu.get(self.actor.infer_batch(rows), "log_probs"), mask)
            difference = (log_probs.values() - rows["old_log_probs"].values()) * mask.values()
            sums = torch.stack([part.sum() for part in difference.split(mask.offsets().diff().tolist())])
            tokens = torch.stack([part.sum() for part in mask.unbind()])
            log_ratios[several] = rollout_log_ratios(sums, tokens, rollout[several])
        return log_ratios


@torch.no_grad()
def _copy(values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
