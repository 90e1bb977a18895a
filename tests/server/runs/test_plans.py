from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from server.runs.plans import evaluation_steps, expected_trials
from server.runs.stats import wilson
from server.spec import resolve


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 12]), (4, [0, 4, 8, 12]), (5, [0, 5, 10, 12]), (12, [0, 12]), (20, [0, 12])])
def test_evaluations_are_before_between_and_after(every: int, steps: list[int]) -> None:
    spec = resolve({"extends": "local"}, {"trainer.steps": 12, "trainer.evaluation.every": every}).spec
    assert evaluation_steps(spec) == steps
    assert expected_trials(spec) == 12 * 64 + len(steps) * 128


@given(st.integers(1, 1000), st.data())
def test_the_interval_holds_the_share_and_shrinks_with_n(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    wider = wilson(successes * 4, n * 4)
    assert wider[1] - wider[0] < high - low


def test_the_interval_is_wilsons() -> None:
    assert wilson(0, 0) == (0, 1)
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)


@pytest.mark.parametrize("name", ["nowhere", "a file", "n" * 5000, "circle"])
def test_a_plan_names_a_directory_that_is_not_there(client: TestClient, tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "circle").symlink_to("circle")
    request = {"document": {"extends": "local"}, "overrides": {"model.path": name}, "base": str(tmp_path)}
    answer = client.post("/api/plans", json=request)
    assert answer.status_code == 422
    (check,) = answer.json()["checks"]
    assert (check["where"], "give" in check["fix"]) == ("model.path", True)
    assert str(tmp_path / name) in check["message"]
