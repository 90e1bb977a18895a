from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.spec import SpecError, preset_names, resolve


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_is_a_valid_spec(name: str) -> None:
    resolved = resolve({"extends": name})
    assert resolved.spec.harnesses
    assert set(resolved.provenance.values()) <= {"default", *(f"preset {other}" for other in preset_names())}


def test_the_local_preset_says_what_the_demo_runs() -> None:
    spec = resolve({"extends": "local"}).spec
    assert spec.model.path == "builtin:onebug-mini-swe-agent"
    assert (spec.harnesses[0].name, spec.harnesses[0].version, spec.harnesses[0].start) == ("mini-swe-agent", "2.4.6", "warm_fork")
    assert (spec.rollout.tasks_per_step, spec.rollout.group_size, spec.trainer.evaluation.rollouts) == (8, 8, 128)
    assert (spec.algorithm.clip_low, spec.algorithm.clip_high, spec.algorithm.ratio_base) == (0.03, 0.04, "recomputed")


def test_a_later_layer_wins_and_a_list_is_replaced_whole() -> None:
    spec = resolve({"extends": "local-claude-code"}).spec
    assert [(harness.name, harness.start) for harness in spec.harnesses] == [("claude-code", "exec")]
    assert spec.trainer.learning_rate == 1e-3


def test_every_value_knows_where_it_came_from() -> None:
    resolved = resolve({"extends": "local", "trainer": {"seed": 3}}, {"trainer.steps": "20"}, base="/somewhere")
    assert resolved.spec.trainer.steps == 20
    assert resolved.provenance["trainer.steps"] == "override"
    assert resolved.provenance["trainer.seed"] == "file in /somewhere"
    assert resolved.provenance["trainer.learning_rate"] == "preset local"
    assert resolved.provenance["trainer.grad_clip"] == "default"


def test_relative_paths_start_at_the_document() -> None:
    document = {"extends": "local", "model": {"path": "policy"}, "data": {"family": None, "train": "../tasks"}}
    spec = resolve(document, base="/home/me/project").spec
    assert spec.model.path == "/home/me/project/policy"
    assert str(spec.data.train) == "/home/me/tasks"
    assert resolve({"extends": "local"}, base="/home/me").spec.model.path.startswith("builtin:")


@pytest.mark.parametrize(
    ("document", "overrides", "words"),
    [
        ({"extends": "lokal"}, {}, "did you mean `local`?"),
        ({"extends": "local", "trainr": {"steps": 3}}, {}, "did you mean `trainer`?"),
        ({"extends": "local", "harnesses": [{"name": "x", "versoin": "1"}]}, {}, "did you mean `version`?"),
        ({"extends": "local"}, {"trainer.evaluation.evry": 2}, "unknown key `trainer.evaluation.evry` (override) (did you mean `every`?)"),
        ({"extends": "local"}, {"trainer.steps": "many"}, "`trainer.steps` (override): input should be a valid integer"),
        ({"extends": "local"}, {"trainer..steps": 1}, "is not a field such as trainer.steps"),
        ({"extends": "local"}, {"data.train": "/tasks"}, "set exactly one of data.family and data.train"),
        (
            {"extends": "local"},
            {"trainer.learning_rate": float("inf")},
            "`trainer.learning_rate` (override): input should be a finite number",
        ),
        ({"extends": "local"}, {"trainer.steps": 10**30}, "`trainer.steps` (override): input should be less than or equal to 1000000"),
        ({"extends": "local"}, {"model.path": "a\0b"}, "a character that is no text"),
        ({"extends": "local"}, {"reporting.name": ["\ud800"]}, "a character that is no text"),
        ({"extends": "local"}, {"a." * 100_000 + "b": 1}, "is not a field such as trainer.steps"),
        ({}, {}, "`model` is missing (set it, or start from a preset: `extends: local`)"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(document: dict[str, Any], overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve(document, overrides)
    assert words in str(caught.value)


@given(st.integers(1, 100), st.integers(2, 16), st.booleans())
def test_the_digest_depends_on_values_and_not_on_their_layers(steps: int, group: int, as_override: bool) -> None:
    document: dict[str, Any] = {"extends": "local", "trainer": {"steps": steps}}
    overrides: dict[str, Any] = {"rollout.group_size": group}
    if as_override:
        document, overrides = {"extends": "local"}, {"rollout.group_size": str(group), "trainer.steps": steps}
    again = resolve({"extends": "local", "rollout": {"group_size": group}, "trainer": {"steps": steps}})
    assert resolve(document, overrides).digest == again.digest
    assert resolve({"extends": "local"}, {"trainer.steps": steps + 1, "rollout.group_size": group}).digest != again.digest
