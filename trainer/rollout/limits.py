"""From the RunSpec to what the proxy enforces."""

from __future__ import annotations

from server.schemas.runspec import Admission, RunSpec
from trainer.proxy.gate import Rule
from trainer.proxy.limits import Limits


def rollout_limits(spec: RunSpec) -> Limits:
    rollout = spec.rollout
    return Limits(
        max_turns=rollout.max_turns,
        context=spec.model.context,
        prompt=rollout.prompt_budget,
        response=rollout.response_budget,
        budget=rollout.token_budget,
        idle_turns=rollout.no_tool_call_cap or None,
    )


def gate_rule(admission: Admission) -> Rule | None:
    if not admission.enabled:
        return None
    return Rule(
        watermark=admission.watermark,
        resident=admission.resident_prefix,
        ownership=admission.ownership_s,
        longest_wait=admission.max_wait_s,
    )
