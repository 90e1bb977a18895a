"""The warm start: supervised training on the demonstrations, Muon on matrices and AdamW on the rest, on one CPU thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .demonstrations import Episode


@dataclass(frozen=True, slots=True)
class Recipe:
    """Two phases. First only good demonstrations, until the mean loss on policy tokens over 50 steps is below `skill_loss` (or for
    `skill_steps`): every kind of task is learned in a sudden transition, and bad examples delay it or prevent it. Then `habit_steps` on the
    mix of ways of working, with learning rates that fall linearly to zero.
    """

    batch: int = 16
    skill_loss: float = 0.006
    skill_steps: int = 1500
    habit_steps: int = 600
    muon_lr: float = 0.015
    adamw_lr: float = 3e-3


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iteration, per matrix; a 3-D weight is a stack of matrices (Jordan et al., 2024)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonal(weight.grad.lerp(buffer, group["momentum"]))
                weight.add_(update, alpha=-group["lr"] * max(1, weight.shape[-2] / weight.shape[-1]) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def train(model: Any, skill: Iterator[Episode], habits: Iterator[Episode], recipe: Recipe, report: Callable[[str], None]) -> None:
    """Train in place. `skill` gives good demonstrations and `habits` the mix, each episode seen once."""
    optimizers = _optimizers(model, recipe)
    model.train()
    started = time.monotonic()
    recent: list[float] = []

    def step(source: Iterator[Episode], factor: float) -> float:
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        loss, policy_loss = _loss(model, list(itertools.islice(source, recipe.batch)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        recent[:] = [*recent[-49:], policy_loss]
        return sum(recent) / len(recent)

    for number in range(1, recipe.skill_steps + 1):
        mean = step(skill, min(1.0, number / 20))
        if number % 50 == 0:
            report(f"skill  {number:4d} (at most {recipe.skill_steps})  loss {mean:.4f}  {time.monotonic() - started:.0f} s")
            if mean < recipe.skill_loss:
                break
    recent.clear()
    for number in range(1, recipe.habit_steps + 1):
        mean = step(habits, 1 - (number - 1) / recipe.habit_steps)
        if number % 50 == 0:
            report(f"habits {number:4d} of {recipe.habit_steps}  loss {mean:.4f}  {time.monotonic() - started:.0f} s")
    model.eval()


def _optimizers(model: Any, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its full learning rate: Muon for matrices, AdamW for embeddings, norms and routers."""
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2 and "embed_tokens" not in name and "mlp.gate.weight" not in name]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        (Muon(matrices, recipe.muon_lr), recipe.muon_lr),
        (torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0), recipe.adamw_lr),
    ]


def _loss(model: Any, batch: Sequence[Episode]) -> tuple[torch.Tensor, float]:
    """Weighted mean cross-entropy, and the plain mean over policy tokens (weight 1)."""
    length = max(len(episode.ids) for episode in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    weight = torch.zeros(len(batch), length)
    for row, episode in enumerate(batch):
        ids[row, : len(episode.ids)] = torch.tensor(episode.ids)
        weight[row, : len(episode.ids)] = torch.tensor(episode.weight)
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    chosen = weight[:, 1:] > 0
    entropy = F.cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen], reduction="none")
    share = weight[:, 1:][chosen]
    return (entropy * share).sum() / share.sum(), float(entropy[share == 1].mean().detach())
