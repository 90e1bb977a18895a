"""The training worker's update against the objective written down by hand on a plain transformers model; prints the largest gaps as JSON.

usage: python -m tests.trainer.verl_plugin.update_probe MODEL_DIR PORT
"""

from __future__ import annotations

import json
import sys
from typing import Any

CLIP = 0.02, 0.03
LR, STEPS = 1e-3, 3
ROLLOUT = [0, 0, 1, 2, 2]
"""Five rows: the first and the last rollout have two branches each."""
SHAPES = [(12, 30), (20, 9), (8, 25), (15, 22), (9, 31)]
"""Prompt and response lengths."""
ADVANTAGES = [1.3, -0.7, -0.9]


def main(model: str, port: str) -> None:
    from tests.trainer.verl_plugin.replay_probe import make_worker, prepare

    prepare(port)
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.verl_plugin.worker import CpuWorker

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    rows = make_rows(reference)
    worker = CpuWorker.__new__(CpuWorker)  # what update_actor needs of it; the rest wants a Ray actor
    worker.actor = make_worker(model)
    worker.actor.set_loss_fn(loss())
    metrics = worker.update_actor(batch(rows))["metrics"]
    losses = train_by_hand(reference, rows)

    trained = dict(worker.actor.engine.get_per_tensor_param()[0])
    expected = dict(by_hf_name(reference))
    gap = max(float((trained[name] - expected[name]).abs().max()) for name in expected)
    moved = max(
        float((tensor - before).abs().max()) for (_, tensor), before in zip(reference.named_parameters(), rows["start"], strict=True)
    )
    answer = {
        "parameter_gap": gap,
        "moved": moved,
        "losses": [step["loss"] for step in metrics],
        "by_hand": losses,
        "rollouts": [step["rollouts"] for step in metrics],
        "clipped": [step["clipped"] for step in metrics],
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def loss() -> Any:
    from functools import partial

    from trainer.verl_plugin.loss import branch_gspo

    return partial(branch_gspo, clip_low=CLIP[0], clip_high=CLIP[1])


def make_rows(reference: Any) -> dict[str, Any]:
    """Random tokens; about a third of a response is trained; old log-probs are the model's own."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 90, (prompt + response,), generator=generator) for prompt, response in SHAPES]
    masks = [(torch.rand(response, generator=generator) < 0.4).long() for _, response in SHAPES]
    for mask in masks:
        mask[0] = 1
    with torch.no_grad():
        old = [log_probs(reference, row, prompt) for row, (prompt, _) in zip(ids, SHAPES, strict=True)]
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    return {"ids": ids, "masks": masks, "old": old, "start": start}


def log_probs(model: Any, ids: Any, prompt: int) -> Any:
    """Of the response's tokens, [response]."""
    logits = model(ids.unsqueeze(0)).logits[0].float().log_softmax(-1)
    return logits[prompt - 1 : -1].gather(-1, ids[prompt:].unsqueeze(-1)).squeeze(-1)


def batch(rows: dict[str, Any]) -> Any:
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def jagged(parts: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    counts = torch.stack([mask.sum() for mask in rows["masks"]]).float()
    rollout = torch.tensor(ROLLOUT)
    share = counts / torch.zeros(3).index_add(0, rollout, counts)[rollout]
    fields = {
        "prompts": jagged([ids[:prompt] for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]),
        "responses": jagged([ids[prompt:] for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]),
        "input_ids": jagged(rows["ids"]),
        "position_ids": jagged([torch.arange(len(ids)) for ids in rows["ids"]]),
        "response_mask": jagged(rows["masks"]),
        "loss_mask": jagged(rows["masks"]),
        "old_log_probs": jagged(rows["old"]),
        "rollout": rollout,
        "share": share,
        "weight": torch.tensor(ADVANTAGES)[rollout] * share / 3,
    } | {f"minibatch_{epoch}": torch.zeros(5, dtype=torch.long) for epoch in range(STEPS)}
    data = TensorDict(fields, batch_size=5)
    tu.assign_non_tensor(data, epochs=STEPS, minibatches=1, temperature=1.0, calculate_entropy=False, global_batch_size=1)
    tu.assign_non_tensor(data, max_token_len_per_gpu=64)  # several micro-batches: branches of a rollout are computed apart
    return data


def train_by_hand(model: Any, rows: dict[str, Any]) -> list[float]:
    """-1/3 sum over rollouts of min(s A, clip(s) A), s = exp(mean over all trained tokens of log π - log π_old), by plain autograd."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        sums, tokens = [torch.zeros(()) for _ in ADVANTAGES], [0] * 3
        for owner, ids, mask, old, (prompt, _) in zip(ROLLOUT, rows["ids"], rows["masks"], rows["old"], SHAPES, strict=True):
            sums[owner] = sums[owner] + ((log_probs(model, ids, prompt) - old) * mask).sum()
            tokens[owner] += int(mask.sum())
        sigmas = [(total / count).exp() for total, count in zip(sums, tokens, strict=True)]
        terms = [torch.min(s * a, s.clamp(1 - CLIP[0], 1 + CLIP[1]) * a) for s, a in zip(sigmas, ADVANTAGES, strict=True)]
        objective = -sum(terms) / 3
        optimizer.zero_grad()
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(objective))
    return losses


def by_hf_name(model: Any) -> Any:
    """Parameters under the names that verl streams: experts one by one."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for index, expert in enumerate(parameter.detach()):
                gate, up = expert.chunk(2)
                yield name.replace("gate_up_proj", f"{index}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{index}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(parameter.detach()):
                yield name.replace("down_proj", f"{index}.down_proj.weight"), expert
        else:
            yield name, parameter.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
