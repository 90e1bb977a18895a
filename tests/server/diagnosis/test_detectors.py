from hypothesis import given
from hypothesis import strategies as st

from server.diagnosis.detectors import DETECTORS, infrastructure_failures, policy_stopped_calling_tools, reward_attempts, zero_signal_groups
from server.diagnosis.pack import GroupFacts, Pack, TrialFacts
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination


def scored(reward: int) -> Scored:
    return Scored(reward=reward, termination=Termination.COMPLETED)  # type: ignore[arg-type]


def failed(cause: Cause, detail: str = "no space left") -> Failed:
    return Failed(stage=Stage.SANDBOX_SETUP, cause=cause, detail=detail)


def group(step: int, outcomes: list[Scored | Failed], calls: int | None = 3, name: str = "g") -> GroupFacts:
    gid = f"{name}{step}"
    trials = tuple(TrialFacts(f"{gid}-{i}", gid, step, o, turns=4, tool_calls=calls) for i, o in enumerate(outcomes))
    return GroupFacts(gid, f"task-{step}", step, trials)


def test_a_healthy_run_has_no_finding() -> None:
    pack = Pack("r", tuple(group(s, [scored(0), scored(1), scored(1), scored(0)]) for s in range(1, 9)))
    assert [f for detector in DETECTORS.values() for f in detector(pack)] == []


def test_an_empty_run_has_no_finding() -> None:
    assert [f for detector in DETECTORS.values() for f in detector(Pack("r"))] == []


def test_infrastructure_failures_name_cause_step_and_trials() -> None:
    healthy = [scored(0), scored(1)] * 4
    pack = Pack("r", (group(1, healthy), group(2, [failed(Cause.SANDBOX_SETUP)] * 3 + healthy[:5]), group(3, healthy)))
    (finding,) = infrastructure_failures(pack)
    assert finding.id == "r.infrastructure_failures-sandbox_setup" and finding.fault == "infrastructure"
    assert [e.id for e in finding.evidence] == ["run", "step:2", "trial:g2-0", "trial:g2-1", "trial:g2-2"]
    assert finding.evidence[0].values == {"failed": 3, "trials": 24}
    assert "no space left" in finding.evidence[2].text


def test_failures_of_an_evaluation_count_too() -> None:
    (finding,) = infrastructure_failures(Pack("r", (), (group(0, [failed(Cause.ENGINE), scored(1)]),)))
    assert finding.evidence[1].id == "eval:0"


def test_one_lost_trial_in_many_is_no_finding() -> None:
    outcomes = [scored(i % 2) for i in range(63)]
    assert infrastructure_failures(Pack("r", (group(1, [failed(Cause.RUNNER_LOST), *outcomes]),))) == []


def test_zero_signal_says_which_side() -> None:
    hard = Pack("r", tuple(group(s, [scored(0)] * 4) for s in range(1, 5)))
    easy = Pack("r", tuple(group(s, [scored(1)] * 4) for s in range(1, 5)))
    assert "too hard" in zero_signal_groups(hard)[0].detail and "too easy" in zero_signal_groups(easy)[0].detail
    assert zero_signal_groups(hard)[0].evidence[0].values == {"without_signal": 1, "groups": 1}


def test_failed_members_do_not_make_a_group_flat_or_mixed() -> None:
    pack = Pack("r", tuple(group(s, [scored(1), scored(0), failed(Cause.ENGINE)]) for s in (1, 2, 3)))
    assert zero_signal_groups(pack) == []
    alone = Pack("r", (group(1, [scored(1), failed(Cause.ENGINE)]),))
    assert zero_signal_groups(alone) == []  # one scored member says nothing about signal


def test_policy_that_stops_calling_tools() -> None:
    mixed: list[Scored | Failed] = [scored(0), scored(1)]
    fading = Pack("r", tuple(group(s, mixed, calls=4 if s <= 3 else 1) for s in range(1, 7)))
    assert "1.00 tool calls per trial in the last 3 steps against 4.00" in policy_stopped_calling_tools(fading)[0].detail
    silent = Pack("r", (group(1, mixed, calls=0),))
    assert policy_stopped_calling_tools(silent)[0].evidence[-1].id == "trial:g1-1"
    unknown = Pack("r", (group(1, mixed, calls=None),))
    assert policy_stopped_calling_tools(unknown) == []


outcome = st.one_of(st.sampled_from([0, 1]).map(scored), st.sampled_from(list(Cause)).map(failed))


@given(st.lists(st.lists(outcome, max_size=6), max_size=8), st.one_of(st.none(), st.integers(0, 5)))
def test_detectors_take_any_pack_and_cite_only_what_exists(steps: list[list[Scored | Failed]], calls: int | None) -> None:
    pack = Pack("r", tuple(group(i + 1, outcomes, calls) for i, outcomes in enumerate(steps)))
    trials = {f"trial:{t.trial_id}" for g in pack.groups for t in g.trials}
    known = trials | {f"group:{g.group_id}" for g in pack.groups} | {f"step:{g.step}" for g in pack.groups} | {"run"}
    findings = [f for detector in DETECTORS.values() for f in detector(pack)]
    assert len({f.id for f in findings}) == len(findings)
    assert all(f.evidence and {e.id for e in f.evidence} <= known for f in findings)


def test_attempts_on_the_reward_are_named_with_what_they_earned() -> None:
    cheat = scored(1).model_copy(update={"evidence": ["git_history: git log --all -p", "test_edit: rm -rf tests"]})
    pack = Pack("r", (group(1, [cheat, scored(0), scored(0), failed(Cause.ENGINE)]),))
    (finding,) = reward_attempts(pack)
    assert finding.id == "r.reward_attempts-git_history" and finding.fault == "policy"
    assert [(row.id, row.text) for row in finding.evidence] == [("run", "1 of 4 trials"), ("trial:g1-0", "git_history: git log --all -p")]
    assert "100% of them were solved, 33% of all" in finding.detail
    assert reward_attempts(Pack("r", (group(1, [cheat, *[scored(0)] * 63]),))) == []
