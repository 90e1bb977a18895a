"""The training worker's updates against the objectives written down by hand on a plain transformers model; prints both as JSON.

Three groups with failures: one with signal whose first and last rollout have two branches, one without signal, one lone survivor. All
cases go on from the weights and optimizer state of the one before, in verl and by hand, so the captured log-probs lag more and more.

usage: python -m tests.trainer.verl_plugin.update_probe PORT RANK WORLD MODEL_DIR SEQUENCE [MODEL_DIR SEQUENCE]...
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

CLIP = 0.02, 0.03
WIDE = 0.9, 9.0
LR = 1e-3
BETA, CAP = 0.3, 1.02
REWARDS = [[1, 0, None, 0], [1, 1], [1, None]]
BRANCHES = [[2, 1, 1, 2], [1, 1], [1, 1]]
SHAPES = [(12, 30), (20, 9), (8, 25), (5, 6), (15, 22), (9, 31), (7, 12), (11, 17), (6, 8), (4, 7)]
"""Prompt and response lengths of the branches of all rollouts in order, those of failed ones too."""


@dataclass(frozen=True)
class Case:
    name: str
    loss: str = "gspo"
    steps: int = 2
    kl: bool = False
    correction: bool = False
    recomputed: bool = False
    minibatches: int = 1
    micro_batch: int | None = None
    only: str | None = None
    """Of all rollouts with rows, train this one."""
    in_parts: bool = False
    """Train a group at a time, with one optimizer step behind them."""
    clip: tuple[float, float] = CLIP


CASES = [
    Case("gspo", steps=3),
    Case("gspo_apart", steps=1, minibatches=4, clip=WIDE),
    Case("gspo_by_rows", steps=1, micro_batch=2, clip=WIDE),
    Case("gspo_alone", steps=1, only="a_1", clip=WIDE),
    Case("gspo_in_parts", steps=1, clip=WIDE, in_parts=True),
    Case("grpo", "grpo"),
    Case("ppo", "ppo"),
    Case("gspo_kl", kl=True),
    Case("ppo_kl", "ppo", kl=True),
    Case("grpo_corrected", "grpo", correction=True),
    Case("gspo_recomputed", steps=1, recomputed=True),
]


def main(port: str, rank: str, world: str, *models: str) -> None:
    from tests.trainer.verl_plugin.replay_probe import prepare

    prepare(port, int(rank), int(world))
    answers = [trained(models[i], int(rank), int(world), int(models[i + 1])) for i in range(0, len(models), 2)]
    if rank == "0":
        sys.stdout.write("\n" + json.dumps(answers) + "\n")


def trained(model: str, rank: int, world: int, sequence: int) -> dict[str, Any]:
    """`sequence` ranks share each sequence and have the same rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.trainer.verl_plugin.replay_probe import make_worker
    from trainer.verl_plugin.loss import Objective
    from trainer.verl_plugin.worker import LegoWorker

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    rows = make_rows(reference)
    worker = LegoWorker.__new__(LegoWorker)  # what it needs here; the rest wants a Ray actor
    worker.actor = make_worker(model, ulysses_sequence_parallel_size=sequence, param_offload=True, optimizer_offload=True)
    worker.enable_routing_replay, worker._kept, worker._seconds = False, {}, 0.0
    place, copies = rank // sequence, world // sequence
    worker.keep_weights(0, 0)
    answer: dict[str, Any] = {"cases": {}}
    for case in CASES:
        worker.objective = Objective("sequence" if case.loss == "gspo" else "token", *case.clip)
        worker.actor.set_loss_fn(worker.objective)
        engine = worker.actor.engine_config
        engine.use_dynamic_bsz, engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu = (
            case.micro_batch is None, case.micro_batch, case.micro_batch,
        )  # fmt: skip
        if case.recomputed:
            answer |= gaps(worker, reference, rows["start"])  # behind this case the two go apart, which is its point
            answer |= looks(worker, reference, rows, place, copies)
            answer |= alignment(worker, rows) if sequence > 1 else {}
            with torch.no_grad():
                rows["base"] = [log_probs(reference, ids, prompt) for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]
        planned = plan(rows, case, copies)
        metrics = update(worker, rows, case, planned, place, copies)
        by_hand = train_by_hand(reference, optimizer, rows, case, planned)
        fields = ("loss", "grad_norm", "rollouts", "clipped", "kl")
        answer["cases"][case.name] = {"by_hand": by_hand} | {field: [step[field] for step in metrics] for field in fields}
    return answer


def update(worker: Any, rows: dict[str, Any], case: Case, planned: list[Any], rank: int, world: int) -> list[dict[str, float]]:
    from trainer.verl_plugin.parts import one_update

    if not case.in_parts:
        output = worker.update_actor(part(batch(rows, case, planned), rank, world))
        return [] if output is None else list(output["metrics"])
    parts = []
    for rollout in sorted({row.rollout for row in planned}):
        members = batch(rows, case, [row for row in planned if row.rollout == rollout])
        worker.compute_log_prob(part(members, rank, world))  # scored between the others' gradients
        output = worker.update_actor(part(members, rank, world))
        parts += [] if output is None else output["metrics"]
    norm = worker.finish_update()
    return [one_update(parts, norm)] if parts else []


def part(data: Any, rank: int, world: int) -> Any:
    """This rank's rows as verl's dispatch cuts them. A rank may get none, and then it gets no columns."""
    from tensordict import NonTensorData, TensorDict
    from verl.utils import tensordict_utils as tu

    base, longer = divmod(len(data), world)
    sizes = [base + (place < longer) for place in range(world)]
    if sizes[rank]:
        return tu.index_select_tensor_dict(data, list(range(sum(sizes[:rank]), sum(sizes[: rank + 1]))))
    empty = TensorDict({}, batch_size=(0,))
    tu.assign_non_tensor(empty, **{name: value.data for name, value in data.items() if isinstance(value, NonTensorData)})
    return empty


def looks(worker: Any, reference: Any, rows: dict[str, Any], rank: int, world: int) -> dict[str, float]:
    """Largest differences from the plain model: of the probe, of all rows, of a single row, and of rows under the first weights."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    def gap(found: Any, data: Any, wanted: list[Any]) -> float:
        if not isinstance(found, TensorDict):  # a rank without rows, or without the model's output
            assert len(data) == 0 or found is None
            return 0.0
        pairs = zip(response_from_nested(found["log_probs"], data["response_mask"]).unbind(), wanted, strict=True)
        return max(float((new - by_hand).abs().max()) for new, by_hand in pairs)

    probe = worker.probe()
    with torch.no_grad():
        answers = [log_probs(reference, ids, prompt) for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]
        probed = probe and log_probs(reference, torch.tensor(probe.ids), 1)
    data = batch(rows, Case(""), plan(rows, Case(""), world))
    numbers = data["number"].tolist()
    mine = part(data, rank, world)
    places = mine["number"].tolist()
    present = gap(worker.compute_log_prob(mine), mine, [answers[n] for n in places])
    lonely = part(tu.index_select_tensor_dict(data, [0]), rank, world)
    alone = gap(worker.compute_log_prob(lonely), lonely, [answers[numbers[0]]])
    older = part(data, rank, world)
    tu.assign_non_tensor(older, version=0)
    first = gap(worker.compute_log_prob_under(older), older, [rows["old"][n] for n in places])
    again = gap(worker.compute_log_prob(part(data, rank, world)), mine, [answers[n] for n in places])
    of_probe = float((torch.tensor(probe.log_probs) - probed).abs().max()) if probe else 0.0
    return {"probe_gap": of_probe, "present_gap": present, "alone_gap": alone, "first_gap": first, "again_gap": again}


def gaps(worker: Any, reference: Any, start: list[Any]) -> dict[str, float]:
    trained = dict(worker.actor.engine.get_per_tensor_param()[0])
    expected = dict(by_hf_name(reference))
    gap = max(float((trained[name] - expected[name]).abs().max()) for name in expected)
    moved = max(float((now - then).abs().max()) for now, then in zip(reference.parameters(), start, strict=True))
    return {"parameter_gap": gap, "moved": moved}


def alignment(worker: Any, rows: dict[str, Any]) -> dict[str, int]:
    """Tokens of all ranks' inputs that carry the routes meant for them, and others."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    engine = worker.actor.engine
    layers = engine.replay.layers

    def routes(ids: Any) -> Any:
        return ((ids[:, None, None] + torch.arange(layers)[:, None] + torch.arange(4)) % 15 + 1).to(torch.int16)

    columns = {"input_ids": rows["ids"], "position_ids": [torch.arange(len(ids)) for ids in rows["ids"]]}
    columns["routed_experts"] = [routes(ids) for ids in rows["ids"]]
    jagged = {name: torch.nested.as_nested_tensor(of, layout=torch.jagged) for name, of in columns.items()}
    data = TensorDict(jagged, batch_size=len(SHAPES))
    tu.assign_non_tensor(data, temperature=1.0)
    with engine.eval_mode():
        inputs, _ = engine.prepare_model_inputs(data)
    carried = engine.replay._routes
    right, wanted = (carried == routes(inputs["input_ids"][0])).all(-1).all(-1), carried.any(-1).any(-1)
    counts = torch.stack([(right & wanted).sum(), (~right & wanted).sum()])
    torch.distributed.all_reduce(counts)
    return {"aligned": int(counts[0]), "misaligned": int(counts[1])}


def make_rows(reference: Any) -> dict[str, Any]:
    """Random tokens; about a third of a response is trained; the captured log-probs are the first weights' own."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 90, (prompt + response,), generator=generator) for prompt, response in SHAPES]
    masks = [(torch.rand(response, generator=generator) < 0.4).long() for _, response in SHAPES]
    for mask in masks:
        mask[0] = 1
    with torch.no_grad():
        old = [log_probs(reference, row, prompt) for row, (prompt, _) in zip(ids, SHAPES, strict=True)]
    correction = [(1 + 0.05 * torch.randn(response, generator=generator)).clamp(max=CAP) for _, response in SHAPES]
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    return {"ids": ids, "masks": masks, "old": old, "base": old, "correction": correction, "start": start}


def log_probs(model: Any, ids: Any, prompt: int) -> Any:
    """Of the response's tokens, [response]."""
    logits = model(ids.unsqueeze(0)).logits[0].float().log_softmax(-1)
    return logits[prompt - 1 : -1].gather(-1, ids[prompt:].unsqueeze(-1)).squeeze(-1)


def played(rows: dict[str, Any]) -> list[Any]:
    """The groups as the rollout manager would hand them over."""
    import numpy as np

    from server.schemas.capture import BranchClass, BranchReason
    from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
    from server.schemas.states import Phase
    from trainer.capture.sample import Sample
    from trainer.rollout.groups import Group
    from trainer.rollout.manager import PlayedGroup
    from trainer.rollout.trial import Rollout

    def sample(number: int) -> Sample:
        prompt, response = SHAPES[number]
        mask = np.concatenate([np.zeros(prompt, bool), rows["masks"][number].numpy().astype(bool)])
        nothing = np.zeros(prompt + response)
        return Sample(
            rows["ids"][number].numpy().astype(np.int32), mask, nothing.astype(np.float32), nothing.astype(np.int32), None,
            np.zeros(prompt + response, bool), prompt, BranchReason.ROOT, BranchClass.POLICY,
        )  # fmt: skip

    numbers = iter(range(len(SHAPES)))
    groups = []
    for name, rewards, branches in zip("abc", REWARDS, BRANCHES, strict=True):
        rollouts = []
        for member, (reward, count) in enumerate(zip(rewards, branches, strict=True)):
            samples = [sample(next(numbers)) for _ in range(count)]
            sampled = sum(int(part.mask.sum()) for part in samples)
            if reward is None:
                outcome: Any = Failed(stage=Stage.AGENT, cause=Cause.AGENT_TIMEOUT)
                rollouts.append(Rollout(f"{name}-{member}", member, outcome, [], sampled, 1))
            else:
                outcome = Scored(reward=1 if reward else 0, termination=Termination.COMPLETED)
                rollouts.append(Rollout(f"{name}-{member}", member, outcome, samples, sampled, 1))
        groups.append(PlayedGroup(Group(name, 1, Phase.TRAIN, name, "h", len(rewards), name), rollouts))
    return groups


def row_numbers() -> dict[str, int]:
    """Key of each branch in the plan of an update → its place in SHAPES."""
    keys: dict[str, int] = {}
    for name, branches in zip("abc", BRANCHES, strict=True):
        for member, count in enumerate(branches):
            for branch in range(count):
                keys[f"{name}_{member}_{branch}"] = len(keys)
    return keys


def plan(rows: dict[str, Any], case: Case, world: int) -> list[Any]:
    """Rows of the update, planned and spread over the ranks by the trainer's own code: branches of a rollout lie on several."""
    from server.schemas.runspec import Algorithm
    from trainer.verl_plugin.ranks import spread
    from trainer.verl_plugin.update import plan_update

    settings = {"loss": case.loss, "kl": BETA if case.kl else 0, "epochs": case.steps, "minibatches": case.minibatches}
    planned = plan_update(played(rows), Algorithm.model_validate(settings), 0).rows
    planned = [row for row in planned if case.only is None or row.key.startswith(case.only)]
    lengths = [sum(SHAPES[row_numbers()[row.key]]) for row in planned]
    return [planned[number] for number in spread(lengths, [row.minibatches[0] for row in planned], world)]


def batch(rows: dict[str, Any], case: Case, planned: list[Any]) -> Any:
    """What the trainer sends to the worker."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    numbers = [row_numbers()[row.key] for row in planned]

    def jagged(parts: list[Any]) -> Any:
        return torch.nested.as_nested_tensor([parts[number] for number in numbers], layout=torch.jagged)

    fields = {
        "number": torch.tensor(numbers),
        "prompts": jagged([ids[:prompt] for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]),
        "responses": jagged([ids[prompt:] for ids, (prompt, _) in zip(rows["ids"], SHAPES, strict=True)]),
        "input_ids": jagged(rows["ids"]),
        "position_ids": jagged([torch.arange(len(ids)) for ids in rows["ids"]]),
        "response_mask": jagged(rows["masks"]),
        "loss_mask": jagged(rows["masks"]),
        "old_log_probs": jagged(rows["base"]),
        "rollout": torch.tensor([row.rollout for row in planned]),
        "share": torch.tensor([row.share for row in planned]),
        "weight": torch.tensor([row.weight for row in planned]),
    } | {f"minibatch_{epoch}": torch.tensor([row.minibatches[epoch] for row in planned]) for epoch in range(case.steps)}
    if case.kl:
        fields |= {"ref_log_prob": jagged(rows["old"]), "kl_weight": torch.tensor([BETA * row.factor for row in planned])}
    if case.correction:
        fields["correction"] = jagged(rows["correction"])
    data = TensorDict(fields, batch_size=len(planned))
    tu.assign_non_tensor(data, epochs=case.steps, minibatches=case.minibatches, temperature=1.0, global_batch_size=1)
    tu.assign_non_tensor(data, calculate_entropy=False, whole=not case.in_parts)
    tu.assign_non_tensor(data, max_token_len_per_gpu=64)  # branches of a rollout are computed apart
    return data


def train_by_hand(model: Any, optimizer: Any, rows: dict[str, Any], case: Case, planned: list[Any]) -> dict[str, list[float]]:
    """The objective as the paper writes it, from rewards and captured log-probs, by autograd. A mini-batch of K is K times its part."""
    import torch

    losses, norms = [], []
    for epoch in range(case.steps):
        for number in range(case.minibatches):
            members = {row.key.rsplit("_", 1)[0] for row in planned if row.minibatches[epoch] == number}
            if not members:
                continue
            objective = -case.minibatches * by_formula(model, rows, case, members)
            optimizer.zero_grad()
            objective.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            losses.append(float(objective))
    return {"loss": losses, "grad_norm": norms}


def by_formula(model: Any, rows: dict[str, Any], case: Case, of: set[str]) -> Any:
    """J of the three groups, the part of the rollouts `of`. Always against the captured log-probs, also where verl gets recomputed ones."""
    import torch

    def clipped(ratio: Any, advantage: float) -> Any:
        return torch.min(ratio * advantage, ratio.clamp(1 - case.clip[0], 1 + case.clip[1]) * advantage)

    numbers = iter(range(len(SHAPES)))
    total, tokens_of_all = torch.zeros(()), 0
    for name, rewards, branches in zip("abc", REWARDS, BRANCHES, strict=True):
        scored = torch.tensor([float(reward) for reward in rewards if reward is not None])
        for member, (reward, count) in enumerate(zip(rewards, branches, strict=True)):
            members = [next(numbers) for _ in range(count)]
            if reward is None:
                continue
            tokens = sum(int(rows["masks"][number].sum()) for number in members)
            tokens_of_all += tokens
            if f"{name}_{member}" not in of:
                continue
            new, old, weight = [], [], []
            for number in members:
                trained = rows["masks"][number].bool()
                new.append(log_probs(model, rows["ids"][number], SHAPES[number][0])[trained])
                old.append(rows["old"][number][trained])
                weight.append(rows["correction"][number][trained] if case.correction else torch.ones(int(trained.sum())))
            after, before, weights = torch.cat(new), torch.cat(old), torch.cat(weight)
            lone_or_equal = len(scored) < 2 or bool((scored == scored[0]).all())
            advantage = 0.0 if lone_or_equal else float((reward - scored.mean()) / (scored.std() + 1e-6))
            if case.loss == "gspo":
                term = clipped((after - before).mean().exp(), advantage)
            else:
                term = (clipped((after - before).exp(), advantage) * weights).mean()
            if case.kl:
                term = term - BETA * ((before - after).exp() - (before - after) - 1).mean()
            total = total + (term * tokens if case.loss == "ppo" else term / len(rewards) / len(REWARDS))
    return total / tokens_of_all if case.loss == "ppo" else total


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
