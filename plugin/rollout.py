"""`rl rollout show`: one rollout as plain text. What a policy, a task or a tool wrote is set off by a bar, so it cannot pass for ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from server.schemas.api import TrialDetail
from server.schemas.capture import BranchRecord, CaptureRecord, TurnRecord, TurnTokens
from server.schemas.harnesslog import HarnessLog, LogEventKind
from server.schemas.outcome import Outcome
from server.schemas.states import Phase

LONGEST = 40
"""Lines of one message, unless all are asked for."""
TOKENS_PER_LINE = 12


def rollout(trial: TrialDetail, record: CaptureRecord, turns: list[TurnRecord], tokens: dict[int, TurnTokens], full: bool) -> Iterator[str]:
    """`turns` are those to show; `tokens` the ids of those of them whose ids are wanted. A line stays one line, whoever wrote it."""
    return (line.replace("\n", " ") for line in _lines(trial, record, turns, tokens, full))


def as_json(trial: TrialDetail, record: CaptureRecord, tokens: dict[int, TurnTokens]) -> str:
    """One object in ASCII: a terminal may show it as it is."""
    body: dict[str, Any] = {"trial": trial.model_dump(mode="json"), "capture": record.model_dump(mode="json")}
    if tokens:
        body["tokens"] = [tokens[turn].model_dump(mode="json") for turn in sorted(tokens)]
    return json.dumps(body)


def _lines(trial: TrialDetail, record: CaptureRecord, turns: list[TurnRecord], tokens: dict[int, TurnTokens], full: bool) -> Iterator[str]:
    yield f"trial {trial.trial_id}  {trial.state}{_outcome(trial.outcome)}"
    step = "" if trial.step is None else f"  {trial.phase} step {trial.step}"
    yield f"  task {trial.task}  harness {record.harness}{step}"
    yield f"  {_count(record.turns, 'turn')}, {_count(record.branches, 'branch', 'branches')}, {record.sampled_tokens} tokens sampled"
    drift = Counter(str(turn.drift) for turn in record.turns if turn.drift)
    if drift:
        yield "  echoed arguments: " + ", ".join(f"{count} {kind}" for kind, count in sorted(drift.items()))
    for violation in record.violations:
        yield f"  VIOLATION {violation}"
    if record.unknown_fields:
        yield f"  unknown fields: {', '.join(record.unknown_fields)}"
    if record.log is not None:
        yield from _harness_log(record.log)
    for branch in record.branches:
        yield _branch(branch, trial)
    for turn in turns:
        yield ""
        yield from _turn(turn, record.branches[turn.branch], full)
        if turn.index in tokens:
            yield from _tokens(tokens[turn.index])


def _harness_log(log: HarnessLog) -> Iterator[str]:
    """What the harness says of itself, and how often; its times and errors by call are in the exported trajectory."""
    said = [f"ended as {log.end!r}" if log.end else "", f"exit status {log.exit_code}" if log.exit_code is not None else ""]
    said += [f"{log.turns} turns by its count"] if log.turns is not None else []
    said += [f"{count} {kind}" for kind, count in sorted(Counter(event.kind.value for event in log.events).items())]
    said += [
        f"{count} {what}" for count, what in ((log.malformed, "malformed"), (log.unknown, "unknown"), (log.dropped, "dropped")) if count
    ]
    yield "  harness's log: " + ", ".join(filter(None, said))
    for event in log.events:
        if event.kind in (LogEventKind.ERROR, LogEventKind.DENIED):
            yield f"  | {event.kind} {event.name} {event.text}"


def _outcome(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    said = f"reward {outcome.reward}, {outcome.termination}" if outcome.kind == "scored" else f"{outcome.cause} in {outcome.stage}"
    return f"  {said}" + (f": {outcome.detail}" if outcome.detail else "")


def _count(items: list[TurnRecord] | list[BranchRecord], one: str, many: str = "") -> str:
    return f"{len(items)} {one if len(items) == 1 else many or one + 's'}"


def _branch(branch: BranchRecord, trial: TrialDetail) -> str:
    versions = f"{branch.min_version}" if branch.min_version == branch.max_version else f"{branch.min_version} to {branch.max_version}"
    return (
        f"  branch {branch.index}  {branch.reason}, {branch.branch_class}, {branch.tokens} tokens, {branch.sampled_tokens} of them "
        f"sampled here by policy version {versions}; {_fate(branch, trial)}"
    )


def _fate(branch: BranchRecord, trial: TrialDetail) -> str:
    if branch.excluded:
        return f"excluded: {branch.excluded}"
    if trial.outcome is None or trial.outcome.kind == "failed":
        return "not trained: the trial has no reward"
    return "trained, if its group has a signal" if trial.phase is Phase.TRAIN else "not trained: an evaluation"


def _turn(turn: TurnRecord, branch: BranchRecord, full: bool) -> Iterator[str]:
    for role, text in turn.context:
        yield f"{role}:"
        yield from _quoted(text, full)
    versions = ", ".join(f"{version} from token {offset}" if offset else str(version) for offset, version in turn.policy_versions)
    notes = [
        f"branch {turn.branch} ({branch.reason})",
        f"{turn.sampled_tokens} tokens sampled behind {turn.prompt_tokens}",
        f"policy version {versions or turn.policy_version}",
        f"ended by {turn.finish}",
    ]
    notes += [f"echoed arguments {turn.drift}"] if turn.drift else []
    notes += [] if turn.delivered else ["NOT DELIVERED, not trained"]
    yield f"turn {turn.index}, {', '.join(notes)}:"
    if turn.reasoning:
        yield "  reasoning"
        yield from _quoted(turn.reasoning, full)
    if turn.text:
        yield from _quoted(turn.text, full)
    for call in turn.tool_calls:
        yield f"  call {call.id}" + (f" ({call.status})" if call.status != "ok" else "")
        yield from _quoted(f"{call.name} {call.arguments}", full)


def _quoted(text: str, full: bool) -> Iterator[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    shown = lines if full or len(lines) <= LONGEST else lines[: LONGEST - 1]
    for line in shown:
        yield f"  | {line}"
    if len(shown) < len(lines):
        yield f"  … {len(lines) - len(shown)} more lines (--full shows them)"


def _tokens(tokens: TurnTokens) -> Iterator[str]:
    """Ids by position; a sampled one, which the mask holds, with its log-prob."""
    at = tokens.start
    for role, ids in [*((part.role, part.ids) for part in tokens.context), ("generation prompt", tokens.scaffold)]:
        for start in range(0, len(ids), TOKENS_PER_LINE):
            yield f"  {at + start:>7}  {role if not start else '':<17}  " + " ".join(map(str, ids[start : start + TOKENS_PER_LINE]))
        at += len(ids)
    pairs = [f"{id}:{log_prob:.4f}" for id, log_prob in zip(tokens.sampled, tokens.log_probs, strict=True)]
    for start in range(0, len(pairs), TOKENS_PER_LINE // 2):
        yield f"  {at + start:>7}  {'SAMPLED' if not start else '':<17}  " + " ".join(pairs[start : start + TOKENS_PER_LINE // 2])
