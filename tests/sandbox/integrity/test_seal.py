"""Tests without their answers: what is taken out, how values are told and judged, and what tests are refused before any run."""

from __future__ import annotations

import ast
import asyncio
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.integrity import grade, hidden, run_tests, seal
from sandbox.integrity.verdict import Grade, Verdict
from sandbox.redteam import targets
from sandbox.runner.drive import Room
from sandbox.runner.outcomes import decide
from sandbox.tasks.prepare import TaskError, check_task
from server.schemas.outcome import Scored, Termination
from tests.sandbox.support import needs_sandbox, play, script_room

from .test_hidden import outcome_of, plan_of, spec, task

IMPORTS = "import pytest\nfrom calc import add\n"


def sealed(source: str) -> tuple[str, list[seal.Answer], bool]:
    """The test as it is without its answers, the answers, and whether they alone decide."""
    tree = ast.parse(source)
    test = tree.body[-1]
    assert isinstance(test, ast.FunctionDef)
    answers: list[seal.Answer] = []
    around = seal.Around(helpers=frozenset({"same"}), fixtures=frozenset({"made"}), tables=seal.tables(tree))
    whole = seal.seal(test, "tell", answers, around)
    return ast.unparse(ast.fix_missing_locations(tree)), answers, whole


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("assert f(2) == 5", "5"),
        ("assert 'five' == f(2)", "'five'"),
        ("assert f(2) is None", "None"),
        ("assert f(2) in [41, 42]", "[41, 42]"),
        ("assert 'needle' in f(2)", "'needle'"),
        ("assert f(2) == pytest.approx(4.25, rel=0.125)", "(4.25, 0.125, None)"),
        ("assert f(1) == -1 and f(2) == 5", "5"),
        ("assert f(2) == {'a': [5, (b'6', {7})]}, 'words'", "{'a': [5, (b'6', {7})]}"),
        ("expected = ['5']\n    f(1)\n    assert f(2) == expected", "['5']"),
        ("for x in [1, 2]:\n        assert f(x) == 77", "77"),
        ("with open(f(1)) as file:\n        assert file.read() == '77'", "'77'"),
        ("try:\n        assert f(2) == 5\n    finally:\n        close()", "5"),
        ("self.assertEqual(f(2), 5)", "5"),
        ("self.assertIsNone(f(2))", "None"),
    ],
)
def test_what_is_right_is_taken_out(body: str, right: str) -> None:
    text, answers, whole = sealed(f"def test_f():\n    {body}\n")
    assert whole
    assert answers[-1]["what"] == [right] and answers[-1]["must"]
    assert right == "None" or right not in text


@pytest.mark.parametrize(
    ("decorator", "body"),
    [
        ("@pytest.mark.parametrize('x, y', [(1, 21), (2, 22)])", "assert f(x) == y"),
        ("@pytest.mark.parametrize(['x', 'y'], [[1, 21], pytest.param(2, 22, id='b')])", "assert y == f(x)"),
        ("@pytest.mark.parametrize('y', (21, 22), ids=['a', 'b'])", "assert f() == y"),
        ("ROWS = [(1, 21), (2, 22)]\n@pytest.mark.parametrize('x, y', ROWS)", "assert f(x) == y"),
        ("@with_x", "for y, z in ((21, 1), (22, 2)):\n        assert f(z) == y"),
        ("ROWS = [(21, 1), (22, 2)]\n@with_x", "for y, z in ROWS:\n        assert y == f(z)"),
        ("@with_x", "rows = [[1, 21], [2, 22]]\n    for z, y in rows:\n        assert f(z) == y"),
    ],
)
def test_columns_of_answers_become_numbers_of_rows(decorator: str, body: str) -> None:
    text, answers, whole = sealed(f"{decorator}\ndef test_f(x{'' if 'for ' in body else ', y'}):\n    {body}\n")
    assert whole and answers == [{"is": "equals", "what": ["21", "22"], "must": True}]
    assert "21" not in text and "tell(0, f(" in text


@pytest.mark.parametrize(
    "body",
    [
        "assert f(2)",
        "assert f(2) == g(2)",
        "assert f(2) == True",
        "assert f(2) != 5",
        "assert f(2) == 5\n    assert f(3) > 4",
        "assert f(2) == 5\n    with pytest.raises(ValueError):\n        f(-1)",
        "assert f(2) == 5\n    same(f(3), 6)",
        "assert f(2) == 5\n    mock.assert_called_once()",
        "with quietly():\n        assert f(2) == 5",
        "with pytest.raises(AssertionError):\n        assert f(2) == 5",
        "try:\n        assert f(2) == 5\n    except AssertionError:\n        pass",
        "if f(1):\n        assert f(2) == 5",
        "for x in f(1):\n        assert f(x) == 5",
        "for x in [1, 2]:\n        if f(x): break\n        assert f(x) == 5",
        "if f(1):\n        return\n    assert f(2) == 5",
        "expected = 5\n    print(expected)\n    assert f(2) == expected",
        "for x, y in [(1, 5), (2, 6)]:\n        assert f(y) == y",
        "y = 0\n    for x, y in [(1, 5), (2, 6)]:\n        assert f(x) == y",
        "for x, y in [*f(1), (2, 6)]:\n        assert f(x) == y",
    ],
)
def test_a_test_that_something_else_decides_needs_twins(body: str) -> None:
    assert not sealed(f"def test_f():\n    {body}\n")[2]


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    assert add(1, 2) == 3\n    if add(2, 2) != 4:\n        raise ValueError\n",
        "def low(a, b):\n    assert a == b\ndef same(a, b):\n    low(a, b)\n"
        "def test_a():\n    assert add(1, 2) == 3\n    same(add(2, 2), 4)\n",
        "def low(a, b):\n    assert a == b\nsame = low\ndef test_a():\n    assert add(1, 2) == 3\n    same(add(2, 2), 4)\n",
        "from help import equal as same\ndef test_a():\n    assert add(1, 2) == 3\n    same(add(2, 2), 4)\n",
        "async def same(a, b):\n    assert a == b\ndef test_a():\n    assert add(1, 2) == 3\n    run(same(add(2, 2), 4))\n",
        "class TestA:\n    def same(self, a, b):\n        self.assertEqual(a, b)\n"
        "    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n        self.same(add(2, 2), 4)\n",
        "class TestA:\n    def tearDown(self):\n        assert add(2, 2) == 4\n    def test_a(self):\n        assert add(1, 2) == 3\n",
        "@pytest.fixture(autouse=True)\ndef after():\n    yield\n    assert add(2, 2) == 4\ndef test_a():\n    assert add(1, 2) == 3\n",
        "@pytest.fixture\ndef after():\n    yield\n    assert add(2, 2) == 4\n"
        "@pytest.mark.usefixtures('after')\ndef test_a():\n    assert add(1, 2) == 3\n",
        "def pytest_sessionfinish():\n    assert add(2, 2) == 4\ndef test_a():\n    assert add(1, 2) == 3\n",
        "@pytest.fixture\ndef after(strict):\n    return 1\ndef test_a(after):\n    assert add(1, 2) == 3\n",
    ],
)
def test_what_decides_out_of_sight_is_seen(tmp_path: Path, source: str) -> None:
    calc = task(tmp_path, IMPORTS + source)
    (calc / "tests" / "help.py").write_text("def equal(a, b):\n    assert a == b\n")
    around = calc / "environment" / "workspace" / "conftest.py"
    around.write_text("import pytest\n\n\n@pytest.fixture\ndef strict():\n    yield\n    assert True\n")
    assert hidden.checks(calc)["twin A"] is not None or hidden.checks(calc)["twin C"] is not None


def test_what_a_fixture_may_want_is_left_to_it() -> None:
    assert not sealed("@pytest.mark.parametrize('made', [1, 2])\ndef test_f(made):\n    assert f() == made\n")[2]


@pytest.mark.parametrize(
    "body",
    [
        "with pytest.raises(AssertionError):\n        assert f(2) == 5",
        "with quietly():\n        assert f(2) == 5",
        "try:\n        assert f(2) == 5\n    except AssertionError:\n        pass",
    ],
)
def test_an_assertion_that_may_fail_stays(body: str) -> None:
    source = f"def test_f():\n    {body}"
    assert sealed(source)[:2] == (source, [])


@pytest.mark.parametrize("mark", ["@again", "@with_again(3)", "@tenacity.retry(stop=3)", "@pytest.mark.flaky"])
def test_a_test_that_is_tried_again_keeps_its_assertions(tmp_path: Path, mark: str) -> None:
    """Its first value was one that it cannot pass with."""
    again = "def again(test):\n    def inner():\n        try: test()\n        except AssertionError: test()\n    return inner\n"
    more = "def with_again(n):\n    def wrap(test):\n        try: test()\n        except AssertionError: test()\n    return wrap\n"
    source = f"{again}{more}{mark}\ndef test_a():\n    assert add(1, 2) == 3\n"
    assert hidden.checks(task(tmp_path, IMPORTS + source))["sealed"] is None


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.text() | st.binary()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4)
VALUES = st.recursive(
    HASHABLE, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(HASHABLE, inner) | st.sets(HASHABLE), max_leaves=6
)


def told(value: object) -> tuple[str, str]:
    """Whether it is exact, and the text, as they stand in the report."""
    lines: list[bytes] = []
    space: dict[str, Any] = {}
    exec(seal.teller("tell"), space)  # noqa: S102
    space["tell"](0, value, write=lambda fd, data: lines.append(data), told=set())
    _, _, _, exact, text = lines[0].decode("ascii").removesuffix("\n").split(" ", 4)
    assert lines[0].decode("ascii").splitlines() == [lines[0].decode("ascii").removesuffix("\n")]
    return exact, text


@given(VALUES)
def test_a_plain_value_comes_out_as_it_is(value: object) -> None:
    exact, text = told(value)
    if "frozenset" in repr(value):  # in a set it has no literal
        assert exact == "0"
        return
    assert exact == "1" and run_tests.meets("equals", value, text)
    assert run_tests.meets("among", [value], text) and run_tests.meets("contains", value, f"[{text}]")


@given(VALUES, VALUES)
def test_other_values_do_not_meet(value: object, other: object) -> None:
    assert run_tests.meets("equals", value, told(other)[1]) in ((value == other), False)


class Agreeable(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        return "5"


class Opaque:
    __class__ = int  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_an_object_counts_for_what_it_holds_not_for_what_it_says() -> None:
    assert told(Agreeable(0)) == ("0", "0")
    assert told([Agreeable(3)]) == ("0", "[3,]")
    assert told([Fraction(1, 2), Decimal(7), {"a": 1}.keys()]) == ("0", "[0.5,7,{'a',},]")
    endless: list[object] = []
    endless.append(endless)
    for value in (Opaque(), float("nan"), endless, "x" * 50_000, iter([1]), 10**5000):
        exact, text = told(value)
        assert not run_tests.meets("equals", 5 if type(value) is Opaque else value, text)
        assert exact == "0" or text == "..."


@pytest.mark.parametrize(
    ("needle", "container"),
    [
        ("mean", {"count": 0, "mean": float("nan")}),
        (3, [float("nan"), complex(0, float("nan")), 3]),
        ("name", {"name": object(), "call": print}),
        ("usage", "x" * 30_000 + "usage"),
        (3, [Opaque(), 3]),
    ],
)
def test_what_is_looked_up_is_found_among_parts_that_have_no_form(needle: object, container: object) -> None:
    """The first two failed honest work: the report said exactly what no test could pass with."""
    text = told(container)[1]
    assert run_tests.meets("contains", needle, text)
    assert not run_tests.meets("contains", "other", text) and not run_tests.meets("equals", container, text[:-2])


def test_no_name_of_a_test_file_changes_what_is_told() -> None:
    """`from store import set` made the file fail before its first test."""
    lines: list[bytes] = []
    shadows = "".join(f"def {name}(*a, **k): return 1 / 0\n" for name in ("set", "len", "type", "dict", "list", "hasattr", "exec", "repr"))
    space: dict[str, Any] = {}
    exec(shadows + seal.teller("tell"), space)  # noqa: S102
    space["tell"](0, [1, {2}], write=lambda fd, data: lines.append(data))
    assert lines == [b"value 0 0 1 [1,{2,},]\n"]


@given(st.floats(-10, 10), st.floats(-10, 10), st.none() | st.floats(0, 1), st.none() | st.floats(0, 1))
def test_approximately_as_pytest_does(found: float, wanted: float, relative: float | None, absolute: float | None) -> None:
    assert run_tests.close(found, wanted, relative, absolute) == (found == pytest.approx(wanted, rel=relative, abs=absolute))
    assert run_tests.close([found], (wanted,), relative, absolute) == ([found] == pytest.approx([wanted], rel=relative, abs=absolute))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        "None",
        "[[[",
        "1+",
        "'a'",
        "{}",
        "(" * 300,
        "9" * 5000,
        "9" * 400,
        "__import__('os')",
        "[1] * 9",
        "{[]: 1}",
        "-" * 9999 + "1",
    ],
)
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("equals", 1), ("among", {1, 2}), ("contains", "x"), ("close", (1.5, None, None)), ("close", ({"a": 1}, None, None))],
)
def test_what_is_no_value_meets_nothing(kind: str, wanted: object, text: str) -> None:
    assert not run_tests.meets(kind, wanted, text)


def judged(plan: dict[str, Any], *lines: str) -> int:
    """What a report with these lines comes to, with what the sentinels must say."""
    report = [f"{outcome} tests/{name}" for name, outcome in plan["sentinels"].items()]
    report += [f"passed tests/{name}" for name in plan["tests"]]
    found = run_tests.judge(plan, 1 << 8, [*report, *lines])
    return 0 if found is None else found[0]


def test_a_report_has_to_tell_every_value_and_each_right(tmp_path: Path) -> None:
    source = "@pytest.mark.parametrize('x, y', [(1, 3), (2, 4)])\ndef test_rows(x, y):\n    assert add(x, 2) == y\n"
    plan = plan_of(hidden.checks(task(tmp_path, IMPORTS + source + "def test_one():\n    assert add(1, 1) == 2\n"))["sealed"])
    right = ["value 0 0 1 3", "value 0 1 1 4", "value 1 0 1 2"]
    assert judged(plan, *right) == 0
    assert judged(plan, *right, right[0]) == 0
    for missing in range(3):
        assert judged(plan, *right[:missing], *right[missing + 1 :]) == 99
    assert judged(plan, *right, "value 1 0 1 7") == 1
    assert judged(plan, *right, "value 1 0 0 7") == 97
    assert judged(plan, "value 0 0 1 4", "value 0 1 1 3", right[2]) == 1
    assert judged(plan, *right, f"failed tests/{next(iter(plan['tests']))}[part]") == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("async def test_a():\n    assert add(1, 1) == 2\n", "line 3: test_a is async"),
        ("@pytest.mark.skip\ndef test_a():\n    pass\n", "test_a is marked skip"),
        ("@pytest.mark.xfail(reason='x')\ndef test_a():\n    assert add(1, 1) == 3\n", "test_a is marked xfail"),
        ("@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.xfail)])\ndef test_a(x):\n    pass\n", "test_a is marked xfail"),
        ("pytestmark = [pytest.mark.skip]\ndef test_a():\n    pass\n", "pytestmark has skip"),
        (
            "import unittest\n@unittest.expectedFailure\nclass TestA:\n    def test_a(self):\n        pass\n",
            "TestA is marked expectedFailure",
        ),
        ("if add:\n    def test_a():\n        pass\ndef test_b():\n    pass\n", "test_a is no function of the file"),
        ("test_a = lambda: None\ndef test_b():\n    pass\n", "test_a is no function of the file"),
        ("from helpers import test_a\ndef test_b():\n    pass\n", "test_a is no function of the file"),
        ("class Base:\n    def test_a(self):\n        pass\nclass TestB(Base):\n    pass\n", "TestB has the tests of Base"),
        ("class TestB:\n    def __init__(self):\n        pass\n    def test_a(self):\n        pass\n", "TestB has a constructor"),
        ("def check():\n    pass\n", "no test function"),
        ("def test_a(:\n", "is not Python"),
    ],
)
def test_a_task_whose_tests_cannot_be_judged_is_refused_before_a_run(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(TaskError, match="task calc.*" + words.replace("(", r"\(")):
        check_task(task(tmp_path, IMPORTS + source))


def test_tests_under_a_name_that_is_not_run_are_refused(tmp_path: Path) -> None:
    calc = task(tmp_path)
    (calc / "tests" / "calc_test.py").write_text("def test_a():\n    pass\n")
    (calc / "tests" / "broken.py").write_text("this is data, not Python\n")
    with pytest.raises(TaskError, match=r"tests/calc_test\.py would not be run"):
        check_task(calc)
    (calc / "tests" / "calc_test.py").unlink()
    check_task(calc)


@needs_sandbox
@pytest.mark.slow
def test_a_test_that_fails_is_tried_again_only_after_the_answers_were_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    task(tmp_path / "tasks", IMPORTS + "def test_a():\n    assert add(1, 1) == 2\n")
    runs: list[Grade] = []
    failures: set[int] = set()
    real = grade.grade

    async def flaky(*arguments: Any, **more: Any) -> Verdict:
        verdict = await real(*arguments, **more)
        runs.append(verdict.grade)
        failed = {"grade": Grade.FAILED, "detail": "a test failed"}
        return verdict.model_copy(update=failed) if len(runs) in failures else verdict

    monkeypatch.setattr(grade, "grade", flaky)

    async def reward(room: Room, *numbers: int) -> tuple[int, int, list[str]]:
        runs.clear()
        failures.clear()
        failures.update(numbers)
        outcome = decide((await play(room, targets.FIX, trial_id=f"t{len(numbers)}{numbers[0]}"))[0])
        assert isinstance(outcome, Scored)
        return outcome.reward, len(runs), outcome.evidence

    async def main() -> None:
        async with script_room(spec(tmp_path / "tasks")) as room:
            assert await reward(room, 1) == (0, 1, [])
            assert await reward(room, 2) == (1, 3, [])
            assert await reward(room, 2, 3) == (0, 3, ["the tests passed, but not again: a test failed"])

    asyncio.run(main())


OWN = """\
from calc import add, total


def test_total():
    assert total(1, 2) == 3
    assert add(1, 2) == 3
"""
OBJECT = "class Total:\n    def __init__(self, n): self.n = n\n    def __eq__(self, other): return self.n == other\n    __hash__ = None\n"


@needs_sandbox
@pytest.mark.slow
def test_objects_of_their_own_are_judged_by_twins_where_the_solution_has_them_too(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    calc = task(tmp_path / "tasks", OWN)
    source = calc / "environment" / "workspace" / "calc.py"
    cheat = "cat > calc.py <<'E'\nclass Total:\n    def __eq__(self, other): return True\ndef total(*a): return Total()\nadd = total\nE\n"
    source.write_text(source.read_text() + OBJECT + "def total(a, b): return Total(add(a, b))\n")
    assert outcome_of(tmp_path / "tasks", targets.FIX) == Scored(reward=1, termination=Termination.COMPLETED)
    fooled = outcome_of(tmp_path / "tasks", cheat)
    assert isinstance(fooled, Scored) and (fooled.reward, fooled.termination) == (0, Termination.TAMPERED)
    source.write_text(targets.BROKEN + "def total(a, b): return add(a, b)\n")
    refused = outcome_of(tmp_path / "tasks", cheat)
    assert isinstance(refused, Scored) and (refused.reward, refused.termination) == (0, Termination.COMPLETED)
    assert any("has no plain form, where the task's own solution" in line for line in refused.evidence)
