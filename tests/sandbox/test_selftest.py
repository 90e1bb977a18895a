"""`rl check` must notice a grader that pays for nothing, and one that pays nobody."""

import asyncio
from pathlib import Path

from sandbox.redteam import targets
from sandbox.runner.selftest import selftest
from server.schemas.probes import SelfTestFacts
from server.schemas.runspec import RunSpec

from .support import needs_sandbox

pytestmark = needs_sandbox


def of(directory: Path, check: str) -> SelfTestFacts:
    targets.write(directory)
    for task in directory.iterdir():
        if task.name != "calc":
            task.rename(directory.parent / task.name)
    for old in (directory / "calc" / "tests").glob("*.py"):
        old.unlink()
    (directory / "calc" / "tests" / "check.py").write_text(check)
    document = {
        "model": {"path": "builtin:none"},
        "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6"}],
        "data": {"train": str(directory)},
    }
    return asyncio.run(selftest(RunSpec.model_validate(document), 1))


def test_a_check_that_imports_what_it_grades_can_be_answered_for(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    facts = of(tmp_path / "tasks", "import sys\nsys.path.insert(0, '.')\nimport calc\nsys.exit(calc.add(1, 2) != 3)\n")
    assert [row.reward for row in facts.oracle] == [1]
    assert [row.reward for row in facts.noop] == [0]
    assert len(facts.problems) == 1 and "answers-for-the-check" in facts.problems[0]


def test_a_check_that_pays_everybody_or_nobody_shows(tmp_path: Path) -> None:
    (tmp_path / "x" / "all").mkdir(parents=True)
    paid = of(tmp_path / "x" / "all", "raise SystemExit(0)\n")
    assert [row.reward for row in paid.noop] == [1] and len(paid.problems) == 2
    for status in (1, 97):  # which means something where tests are hidden
        (tmp_path / str(status) / "none").mkdir(parents=True)
        assert [row.reward for row in of(tmp_path / str(status) / "none", f"raise SystemExit({status})\n").oracle] == [0]


def test_the_reference_solution_and_a_test_that_does_not_pass_with_it(tmp_path: Path) -> None:
    """Which test that was is what one needs to repair the task."""
    (tmp_path / "tasks").mkdir()
    targets.write(tmp_path / "tasks")
    for other in ("history", next(path.name for path in (tmp_path / "tasks").iterdir() if path.name not in ("calc", "history"))):
        (tmp_path / "tasks" / other).rename(tmp_path / other)
    hidden = tmp_path / "tasks" / "calc" / "tests" / "test_hidden.py"
    hidden.write_text(hidden.read_text() + "\n\ndef test_elsewhere(request):\n    import pytest\n    pytest.skip('not here')\n")
    document = {
        "model": {"path": "builtin:none"},
        "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6"}],
        "data": {"train": str(tmp_path / "tasks")},
    }
    facts = asyncio.run(selftest(RunSpec.model_validate(document), 1))
    assert [(row.reward, row.detail) for row in facts.oracle] == [(0, "test_hidden.py::test_elsewhere was skipped")]
