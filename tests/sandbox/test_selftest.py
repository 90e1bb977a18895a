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
    (tmp_path / "y" / "none").mkdir(parents=True)
    paid = of(tmp_path / "x" / "all", "raise SystemExit(0)\n")
    assert [row.reward for row in paid.noop] == [1] and len(paid.problems) == 2
    assert [row.reward for row in of(tmp_path / "y" / "none", "raise SystemExit(1)\n").oracle] == [0]
