"""Deterministic detectors: pure functions from the evidence pack to candidate findings.

Thresholds stand at the top with what they mean. A detector says what was seen and what it may point to, never that it is the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from server.schemas.checks import Evidence, Finding
from server.schemas.hints import HINTS
from server.schemas.outcome import ADMISSION, Scored
from server.schemas.suspicion import Sign

from .pack import GroupFacts, Pack, TrialFacts, failed_of

FAILED_SHARE = 0.05
"""Of all ended trials of a run, by one cause."""
FAILED_SHARE_OF_STEP = 0.2
"""Of the trials of any one step, by one cause."""
ZERO_SIGNAL_SHARE = 0.6
"""Of the groups in the last steps."""
TOOL_CALLS_LEFT = 0.5
"""Tool calls per trial in the last steps, against the first ones."""
ATTEMPT_SHARE = 0.02
"""Of the ended trials: their commands or changes show one kind of sign that they went for the reward."""
_HARMLESS = {Sign.TEST_EDIT}
"""Honest agents do it all the time."""
SILENT_SHARE = 0.3
"""Of the trials in the last steps: not one tool call."""
WINDOW = 3
"""Steps that count as first and as last."""
SHOWN = 5
"""Trials or groups cited by name."""

Detector = Callable[[Pack], list[Finding]]


def _finding(pack: Pack, detector: str, title: str, detail: str, fault: str, evidence: list[Evidence]) -> Finding:
    return Finding(id=f"{pack.run_id}.{detector}", detector=detector, title=title, detail=detail, fault=fault, evidence=evidence)


def infrastructure_failures(pack: Pack) -> list[Finding]:
    """Trials without a reward, by cause: too many of all, or too many of one step (T3, T13, T18, T35)."""
    sections = pack.sections()
    trials = [t for section in sections.values() for t in section]
    failed = failed_of(trials)
    findings = []
    for cause, count in Counter(outcome.cause for _, outcome in failed).most_common():
        shares = {label: sum(o.cause == cause for _, o in failed_of(section)) / len(section) for label, section in sections.items()}
        worst = max(shares, key=shares.__getitem__)
        if count / len(trials) < FAILED_SHARE and shares[worst] < FAILED_SHARE_OF_STEP:
            continue
        rows = [Evidence(id="run", text=f"{count} of {len(trials)} trials", values={"failed": count, "trials": len(trials)})]
        rows.append(Evidence(id=worst, text=f"{shares[worst]:.0%} of its trials", values={"share": round(shares[worst], 4)}))
        rows += [Evidence(id=f"trial:{t.trial_id}", text=f"in {o.stage}: {o.detail}") for t, o in failed if o.cause == cause][:SHOWN]
        detail = f"{count} of {len(trials)} trials have no reward; most in {worst}. They stay out of statistics and loss. "
        detail += f"Candidates: {HINTS[cause]}."
        name = f"infrastructure_failures-{cause}"
        findings.append(_finding(pack, name, f"Trials fail with {cause}", detail, ADMISSION[cause].fault, rows))
    return findings


def zero_signal_groups(pack: Pack) -> list[Finding]:
    """Groups whose rewards are all equal teach nothing; too many of them and the run spends compute without learning."""
    steps = pack.by_step()
    last = list(steps)[-WINDOW:]
    groups = [g for step in last for g in steps[step] if len(g.rewards) >= 2]
    flat = [g for g in groups if g.without_signal]
    if not groups or len(flat) / len(groups) < ZERO_SIGNAL_SHARE:
        return []
    solved = sum(g.rewards[0] == 1 for g in flat)
    rows = [_step_row(step, *_signal(steps[step])) for step in last]
    rows += [Evidence(id=f"group:{g.group_id}", text=f"{g.task}: all {len(g.rewards)} rewards are {g.rewards[0]}") for g in flat[:SHOWN]]
    easy = solved > len(flat) / 2
    detail = (
        f"In the last {len(last)} steps {len(flat)} of {len(groups)} groups have one reward only: "
        f"{solved} all solved, {len(flat) - solved} none solved. "
        + ("Candidates: the tasks are too easy by now." if easy else "Candidates: the tasks are too hard, or the policy has collapsed.")
    )
    return [_finding(pack, "zero_signal_groups", "Most groups carry no signal", detail, "policy", rows)]


def _signal(groups: list[GroupFacts]) -> tuple[str, dict[str, float | int | str]]:
    flat = sum(g.without_signal for g in groups)
    return f"{flat} of {len(groups)} groups without signal", {"without_signal": flat, "groups": len(groups)}


def policy_stopped_calling_tools(pack: Pack) -> list[Finding]:
    """Fewer and fewer tool calls, or trials without any: the policy talks instead of working (T1, T34)."""
    steps = {step: _captured(groups) for step, groups in pack.by_step().items()}
    steps = {step: trials for step, trials in steps.items() if trials}
    if not steps:
        return []
    first, last = list(steps)[:WINDOW], list(steps)[-WINDOW:]
    before, now = _calls(steps, first), _calls(steps, last)
    silent = [t for step in last for t in steps[step] if t.tool_calls == 0]
    share = len(silent) / sum(len(steps[step]) for step in last)
    dropped = len(steps) >= 2 * WINDOW and now < TOOL_CALLS_LEFT * before
    if not dropped and share < SILENT_SHARE:
        return []
    rows = [
        _step_row(step, f"{_calls(steps, [step]):.2f} tool calls per trial", {"tool_calls": round(_calls(steps, [step]), 4)})
        for step in dict.fromkeys(first + last)
    ]
    rows += [Evidence(id=f"trial:{t.trial_id}", text=f"{t.turns} turns, no tool call") for t in silent[:SHOWN]]
    detail = (
        f"{now:.2f} tool calls per trial in the last {len(last)} steps against {before:.2f} in the first; "
        f"{share:.0%} of the last trials call none. "
        "Candidates: the tool parser does not match the chat template, or the policy has drifted."
    )
    return [_finding(pack, "policy_stopped_calling_tools", "The policy stops calling tools", detail, "policy", rows)]


def reward_attempts(pack: Pack) -> list[Finding]:
    """Trials that went for the reward instead of the task, by the kind of sign, and whether those earned it more often than others."""
    trials = [t for section in pack.sections().values() for t in section]
    rate = _solved(trials)
    findings = []
    for sign in (sign for sign in Sign if sign not in _HARMLESS):
        tried = [t for t in trials if any(line.startswith(f"{sign}: ") for line in t.outcome.evidence)]
        if not tried or len(tried) / len(trials) < ATTEMPT_SHARE:
            continue
        values: dict[str, float | int | str] = {"tried": len(tried), "trials": len(trials)}
        rows = [Evidence(id="run", text=f"{len(tried)} of {len(trials)} trials", values=values)]
        lines = [next(line for line in t.outcome.evidence if line.startswith(f"{sign}: ")) for t in tried[:SHOWN]]
        rows += [Evidence(id=f"trial:{t.trial_id}", text=line) for t, line in zip(tried, lines, strict=False)]
        detail = (
            f"{len(tried)} of {len(trials)} trials show signs of {sign}; {_solved(tried):.0%} of them were solved, {rate:.0%} of all. "
            "Candidates: the tasks invite it, or the policy learns to go around them; read the cited trials."
        )
        findings.append(_finding(pack, f"reward_attempts-{sign}", f"Trials show signs of {sign}", detail, "policy", rows))
    return findings


def _solved(trials: list[TrialFacts]) -> float:
    rewards = [t.outcome.reward for t in trials if isinstance(t.outcome, Scored)]
    return sum(rewards) / len(rewards) if rewards else 0


def _captured(groups: list[GroupFacts]) -> list[TrialFacts]:
    return [t for g in groups for t in g.trials if t.tool_calls is not None]


def _calls(steps: dict[int, list[TrialFacts]], window: list[int]) -> float:
    trials = [t for step in window for t in steps[step]]
    return sum(t.tool_calls or 0 for t in trials) / len(trials)


def _step_row(step: int, text: str, values: dict[str, float | int | str]) -> Evidence:
    return Evidence(id=f"step:{step}", text=f"step {step}: {text}", values=values)


DETECTORS: dict[str, Detector] = {
    "infrastructure_failures": infrastructure_failures,
    "zero_signal_groups": zero_signal_groups,
    "policy_stopped_calling_tools": policy_stopped_calling_tools,
    "reward_attempts": reward_attempts,
}
