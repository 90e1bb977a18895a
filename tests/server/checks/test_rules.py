from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.checks.facts import Answer, Facts, PathFact, Room
from server.checks.rules import RULES
from server.schemas.checks import Check, Level
from server.schemas.probes import DeviceFacts, HarnessRuntime, ModelFacts, SelfTestFacts, TaskReward, TemplateClass, TrainedWith, Trouble
from server.schemas.runspec import RunSpec
from server.spec import resolve

HERE = PathFact(exists=True, is_dir=True, writable=True)
GONE = PathFact(exists=False, is_dir=False, writable=False)
MODEL = ModelFacts(directory="/p", experts=16, longest=1024, template=TemplateClass.APPEND_ONLY, prompt_tokens={"mini-swe-agent": 71})
MINI = HarnessRuntime(name="mini-swe-agent", version="2.4.6", installed=True)
GRADED = SelfTestFacts(oracle=[TaskReward(task="a", reward=1)], noop=[TaskReward(task="a", reward=0)], limits_mode="cgroup")
SOUND = Facts(
    data_dir=Path("/data"),
    data=HERE,
    paths={},
    bind_problem="",
    memory_mb=64_000,
    disk_mb=64_000,
    cpus=2,
    trainer=Room("python", versions={"torch": "2.13.0"}),
    sandbox=Room("python", versions={"harbor": "0.26.0"}),
    pins={"trainer": {"torch": "2.13.0"}, "sandbox": {"harbor": "0.26.0"}},
    model=Answer(MODEL),
    harnesses=Answer([MINI]),
    selftest=Answer(GRADED),
)


def local(**overrides: Any) -> RunSpec:
    return resolve({"extends": "local"}, {name.replace("__", "."): value for name, value in overrides.items()}).spec


def checked(facts: Facts, spec: RunSpec | None = None) -> list[Check]:
    return [check for rule in RULES for check in rule(spec or local(), facts)]


def test_on_a_sound_machine_all_is_well() -> None:
    checks = checked(SOUND)
    assert {check.level for check in checks} == {Level.OK}
    codes = {"ports", "memory", "disk", "trainer", "sandbox", "model", "template", "tool_calls", "context", "harness", "oracle", "noop"}
    assert {check.code for check in checks} == codes


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (Answer(DeviceFacts()), []),
        (Answer(DeviceFacts(troubles=[Trouble(where="trainer.device", message="no GPU", fix="get one")])), [("no GPU", "get one")]),
        (Answer(None, "exit code 1"), [("the trainer's environment cannot say whether it can train on GPUs: exit code 1", None)]),
    ],
)
def test_a_run_on_gpus_is_not_promised(answer: Answer[DeviceFacts], refused: list[tuple[str, str | None]]) -> None:
    spec = resolve({"extends": "single-node"}).spec
    warned, *errors = (check for check in checked(replace(SOUND, device=answer), spec) if check.code == "device")
    assert warned.level is Level.WARNING and "a GPU it has not seen yet" in warned.message
    assert [error.message for error in errors] == [message for message, _ in refused]
    assert all(
        error.level is Level.ERROR and error.fix and fix in (None, error.fix) for error, (_, fix) in zip(errors, refused, strict=True)
    )


def test_an_evaluation_repeats_the_history_policy_of_training() -> None:
    before = TrainedWith(renderer="qwen3", thinking=True, history="strip", harnesses=["mini-swe-agent"], run_id="r-1", step=8)
    facts = replace(SOUND, model=Answer(MODEL.model_copy(update={"trained_with": before})))
    (refused,) = (check for check in checked(facts, local(kind="eval", model__thinking=True)) if check.level is not Level.OK)
    assert (refused.code, refused.level) == ("trained_with", Level.ERROR)
    assert (refused.message, refused.fix) == (
        "capture.history is keep, but run r-1 trained these weights with strip",
        "set capture.history=strip",
    )
    (warned,) = (check for check in checked(facts, local(model__thinking=True)) if check.level is not Level.OK)
    assert warned.level is Level.WARNING  # further training may want to change it
    assert {check.level for check in checked(facts, local(kind="eval", model__thinking=True, capture__history="strip"))} == {Level.OK}


def test_the_routes_of_a_step_are_estimated_in_bytes() -> None:
    """Report 41: routes filled a cluster. Qwen3-30B-A3B (48 layers, 8 of 128 experts), 64 rollouts of 40,000 tokens."""
    large = replace(SOUND, model=Answer(MODEL.model_copy(update={"experts": 128, "layers": 48, "top_k": 8, "longest": 40_000})))
    (found,) = (check for check in checked(large, local(model__context=40_000)) if check.code == "routes")
    assert (found.level, found.message) == (Level.OK, "the expert routes of a step take up to 1967 MB")  # 64 · 40,000 · 48 · 8 · 2
    (found,) = (check for check in checked(replace(large, memory_mb=3900), local(model__context=40_000)) if check.code == "routes")
    assert (found.level, found.fix) == (Level.WARNING, "lower rollout.tasks_per_step, rollout.group_size or model.context")


def test_without_thinking_there_is_nothing_to_strip() -> None:
    (refused,) = (check for check in checked(SOUND, local(capture__history="strip")) if check.level is not Level.OK)
    assert (refused.code, refused.level) == ("history", Level.ERROR)


@pytest.mark.parametrize(
    ("facts", "code", "level", "words"),
    [
        (replace(SOUND, data=replace(HERE, writable=False)), "data_dir", Level.ERROR, "/data cannot be written"),
        (replace(SOUND, bind_problem="Operation not permitted"), "ports", Level.ERROR, "Operation not permitted"),
        (replace(SOUND, memory_mb=1000), "memory", Level.ERROR, "1000 MB are available, the trainer alone takes about 2500 MB"),
        (replace(SOUND, memory_mb=6000), "memory", Level.WARNING, "16 sandboxes may take up to 10692 MB"),
        (replace(SOUND, disk_mb=500), "disk", Level.ERROR, "500 MB are free in /data"),
        (replace(SOUND, trainer=Room("py", versions={"torch": None})), "trainer", Level.ERROR, "not installed in py: torch"),
        (replace(SOUND, trainer=Room("py", versions={"torch": None})), "model", Level.SKIPPED, "the trainer is not installed"),
        (replace(SOUND, sandbox=Room("py", problem="cannot run py")), "sandbox", Level.ERROR, "py does not answer: cannot run py"),
        (replace(SOUND, sandbox=Room("py", versions={"harbor": "0.25"})), "sandbox", Level.WARNING, "harbor 0.25 in place of 0.26.0"),
        (replace(SOUND, harnesses=Answer([])), "harness", Level.ERROR, "there is no harness mini-swe-agent"),
        (replace(SOUND, selftest=None), "sandbox", Level.SKIPPED, "left out on request"),
        (replace(SOUND, selftest=Answer(None, "no user namespaces")), "sandbox", Level.ERROR, "no user namespaces"),
    ],
)
def test_what_the_machine_lacks_is_said(facts: Facts, code: str, level: Level, words: str) -> None:
    found = [check for check in checked(facts) if check.code == code and check.level is level]
    assert any(words in check.message for check in found), checked(facts)
    assert level is Level.SKIPPED or all(check.fix for check in found)


@pytest.mark.parametrize(
    ("change", "code", "level", "words"),
    [
        ({"problem": "x is missing"}, "model", Level.ERROR, "cannot be used: x is missing"),
        ({"template": TemplateClass.STRIPS}, "template", Level.WARNING, "drops thinking"),
        ({"template": TemplateClass.REWRITES}, "template", Level.WARNING, "every turn becomes a branch"),
        ({"round_trip": "1 call(s) came back as []"}, "tool_calls", Level.ERROR, "came back as []"),
        ({"experts": 0}, "routing_replay", Level.ERROR, "the model is dense"),
        ({"longest": 128}, "context", Level.ERROR, "256 tokens, the model allows 128"),
        ({"prompt_tokens": {"mini-swe-agent": 230}}, "context", Level.ERROR, "takes 230 of 256 tokens, which leaves no room for one turn"),
    ],
)
def test_what_the_model_cannot_do_is_said(change: dict[str, Any], code: str, level: Level, words: str) -> None:
    facts = replace(SOUND, model=Answer(MODEL.model_copy(update=change)))
    assert any(check.code == code and check.level is level and words in check.message and check.fix for check in checked(facts))


@pytest.mark.parametrize(
    ("change", "code", "level", "words"),
    [
        ({"oracle": [TaskReward(task="a", reward=0)]}, "oracle", Level.ERROR, "the reference solution must score 1: a scored 0"),
        ({"oracle": [TaskReward(task="a", reward=0, detail="test_b did not pass")]}, "oracle", Level.ERROR, "0 (test_b did not pass)"),
        ({"noop": [TaskReward(task="a", reward=1)]}, "noop", Level.ERROR, "doing nothing must score 0: a scored 1"),
        ({"oracle": [TaskReward(task="a", reward=None)]}, "oracle", Level.ERROR, "a got no verdict"),
        ({"problems": ["mount:\n EPERM", "b", "c"]}, "sandbox", Level.ERROR, "mount: EPERM (and 2 more)"),
        ({"limits_mode": "rlimit"}, "limits", Level.WARNING, "per process"),
    ],
)
def test_a_task_or_sandbox_that_does_not_grade_is_said(change: dict[str, Any], code: str, level: Level, words: str) -> None:
    facts = replace(SOUND, selftest=Answer(GRADED.model_copy(update=change)))
    assert any(check.code == code and check.level is level and words in check.message for check in checked(facts))


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (MINI.model_copy(update={"installed": False}), "mini-swe-agent 2.4.6 is not installed"),
        (MINI.model_copy(update={"problem": "2 files differ"}), "2 files differ"),
        (MINI.model_copy(update={"version": "3.0"}), "is pinned at 3.0, the spec asks for 2.4.6"),
    ],
)
def test_a_harness_must_be_the_pinned_one_and_installed(runtime: HarnessRuntime, words: str) -> None:
    facts = replace(SOUND, harnesses=Answer([runtime]))
    assert any(check.code == "harness" and check.level is Level.ERROR and words in check.message for check in checked(facts))


@pytest.mark.parametrize(("field", "value"), [("top_p", 0.95), ("top_k", 50)])
def test_a_cut_distribution_goes_with_no_ratio(field: str, value: float) -> None:
    """Report 37: under top-p or top-k the ratio carries the log of the kept mass."""
    (refused,) = (check for check in checked(SOUND, local(**{f"rollout__{field}": value})) if check.level is not Level.OK)
    assert (refused.code, refused.level, refused.where) == ("sampling", Level.ERROR, f"rollout.{field}")
    assert "the ratio of gspo needs log-probabilities of the whole distribution" in refused.message
    (refused,) = (c for c in checked(SOUND, local(kind="eval", **{f"rollout__{field}": value})) if c.level is not Level.OK)
    assert refused.message.startswith("the engines sample from the whole distribution")


def test_paths_of_the_spec_must_exist() -> None:
    spec = resolve({"extends": "local"}, {"data.family": None, "data.train": "/no/tasks"}).spec
    messages = [check.message for check in checked(replace(SOUND, paths={"data.train": GONE}), spec) if check.level is Level.ERROR]
    assert messages == ["/no/tasks does not exist", "task directories for the held-out evaluation are missing"]


def test_a_mixture_of_experts_without_replay_is_warned_of() -> None:
    assert any("routing is not replayed" in check.message for check in checked(SOUND, local(algorithm__routing_replay=False)))


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_needs_what_could_not_be_gathered(rule: Callable[[RunSpec, Facts], Any]) -> None:
    nothing = replace(SOUND, model=None, harnesses=None, selftest=None, trainer=Room("py", problem="x"), sandbox=Room("py", problem="x"))
    list(rule(local(), nothing))


@pytest.mark.parametrize(
    ("overrides", "level", "words"),
    [
        ({}, Level.WARNING, "keep leaves it in"),
        ({"capture__history": "strip"}, Level.OK, "every user message starts a branch"),
        ({"capture__history": "strip", "capture__train": "parent_exact"}, Level.WARNING, "leaves out what follows the second one"),
    ],
)
def test_a_template_that_strips_is_met_by_the_history_policy(overrides: dict[str, str], level: Level, words: str) -> None:
    """User-pain 2: which of the two is right for a run is said before it starts."""
    facts = replace(SOUND, model=Answer(MODEL.model_copy(update={"template": TemplateClass.STRIPS})))
    (found,) = [check for check in checked(facts, local(**overrides)) if check.code == "template"]
    assert found.level is level and words in found.message
