"""Hidden pytest tests of a task: the check that runs them, and twins of the tests that no honest tree can pass.

The tests import the graded code into their own process, where it can change what the test runner says. A tree that passed is therefore
graded twice more, each time in a fresh sandbox (`run_tests.py` says how a report is judged):

* twin A: every test ends with a false assertion, so every test must fail;
* twin B: every comparison that an honest run certainly reaches is made false: another expected value for `==` and `is`, the opposite of
  `!=`, `<` and the like, strangers in the container of `in`. Values written out in the test are changed in place, so that code which
  reads its answers from the tests reads the wrong ones.

A twin that passes shows that the report, or the value under test, does not depend on the assertion.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import secrets
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

DIRECTORY = "tests"
"""Where tests lie below the work directory while they run."""
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST_AT = "/opt/grader"
_PROGRAM = Path(__file__).with_name("run_tests.py")
_NOT_UPLOADED = ("test.sh", "check.py", "Dockerfile")

Variant = Literal["tests", "twin A", "twin B"]
_CHANGED = """
def {name}(value):
    if isinstance(value, bool): return not value
    if isinstance(value, int): return value + 1
    if isinstance(value, str): return value + "~"
    return object()
"""


class NoTests(Exception):
    """A task's hidden tests cannot be used; the message says why."""


def has_tests(task: Path) -> bool:
    return any(task.glob("tests/**/test_*.py"))


def packages() -> dict[str, Path]:
    """File or directory of every package of the test runner, by its name in a search path. Raises NoTests where one is not installed."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise NoTests(f"this task is graded with pytest, but `{name}` is not installed here: run `uv sync --extra sandbox --inexact`")
        place = Path(spec.origin)
        place = place.parent if spec.submodule_search_locations else place
        found[place.name] = place
    return found


def check(task: Path, variant: Variant) -> str | None:
    """The check program of a variant; None when no test of the task can have this twin. Raises NoTests."""
    files = {
        str(path.relative_to(task / "tests")): path.read_bytes()
        for path in sorted((task / "tests").rglob("*"))
        if path.is_file() and path.name not in _NOT_UPLOADED
    }
    sources = {name: data.decode() for name, data in files.items() if Path(name).match("test_*.py")}
    nonce = secrets.token_hex(6)
    tests: list[str] = []
    for name, source in sources.items():
        tree = _parse(task, name, source)
        chosen = [(key, test) for key, test in _tests(tree) if variant != "twin B" or any(map(_false, _comparisons(test), repeat("_")))]
        tests += [f"{name}::{key}" for key, _ in chosen]
        if variant != "tests":
            files[name] = _twin(tree, [test for _, test in chosen], variant, f"_{nonce}").encode()
    if variant == "tests" and not tests:
        raise NoTests(f"task {task.name} has no test function in tests/test_*.py")
    if not tests:
        return None
    sentinel = f"test_{nonce}.py"
    files[sentinel] = b"def test_1():\n    assert 1 == 1\n\n\ndef test_2():\n    assert 1 == 2\n"
    plan: dict[str, Any] = {
        "directory": DIRECTORY,
        "files": files,
        "run": [*sources, sentinel],
        "tests": tests,
        "sentinels": {f"{sentinel}::test_1": "passed", f"{sentinel}::test_2": "failed"},
        "expect": "passed" if variant == "tests" else "failed",
        "pytest": PYTEST_AT,
    }
    return f"PLAN = {plan!r}\n{_program()}"


@functools.cache
def _program() -> str:
    return _PROGRAM.read_text(encoding="utf-8")


def _parse(task: Path, name: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise NoTests(f"task {task.name}: tests/{name} is not Python: {error}") from error


def _tests(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Test functions by the name that pytest gives them, methods of `Test*` classes included."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests(node, f"{prefix}{node.name}::")


_OPPOSITE = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.NotEq: ast.Eq, ast.IsNot: ast.Is}


def _comparisons(test: ast.FunctionDef) -> list[ast.Compare]:
    """Comparisons that an honest run of `test` certainly reaches: its own assertions, unless it may return early."""
    if any(isinstance(node, ast.Return) for node in ast.walk(test)):
        return []
    asserted = [statement.test for statement in test.body if isinstance(statement, ast.Assert)]
    first = [found.values[0] if isinstance(found, ast.BoolOp) and isinstance(found.op, ast.And) else found for found in asserted]
    return [found for found in first if isinstance(found, ast.Compare)]


def _false(comparison: ast.Compare, name: str) -> ast.Compare | None:
    """The comparison as no honest value can meet it, or None when this is not certain. `name` is a function that changes a value."""
    operator, expected = comparison.ops[-1], comparison.comparators[-1]
    before, others = comparison.ops[:-1], comparison.comparators[:-1]
    if isinstance(operator, ast.Eq | ast.Is):
        return ast.Compare(comparison.left, [*before, operator], [*others, _changed(expected, name)])
    if type(operator) in _OPPOSITE:
        return ast.Compare(comparison.left, [*before, _OPPOSITE[type(operator)]()], [*others, expected])
    if isinstance(operator, ast.In) and isinstance(expected, ast.List | ast.Tuple | ast.Set):
        strangers = ast.List([ast.Call(ast.Name("object", ast.Load()), [], []) for _ in expected.elts], ast.Load())
        return ast.Compare(comparison.left, [*before, operator], [*others, strangers])
    return None


def _twin(tree: ast.Module, tests: list[ast.FunctionDef], variant: Variant, name: str) -> str:
    for test in tests:
        if variant == "twin A":
            number = secrets.randbelow(90) + 10
            test.body = [ast.Try(test.body, [], [], ast.parse(f"assert {number} == {number + 1}").body)]
        else:
            for comparison in _comparisons(test):
                if (false := _false(comparison, name)) is not None:
                    comparison.ops, comparison.comparators = false.ops, false.comparators
    source = ast.unparse(ast.fix_missing_locations(tree))
    return source + _CHANGED.format(name=name) if f"{name}(" in source else source


def _changed(expected: ast.expr, name: str) -> ast.expr:
    try:
        value = ast.literal_eval(expected)
    except ValueError:
        return ast.Call(ast.Name(name, ast.Load()), [expected], [])
    match value:
        case bool():
            return ast.Constant(not value)
        case int():
            return ast.Constant(value + secrets.randbelow(9) + 1)
        case float() | complex():
            return ast.Constant(0.5 if value != 0.5 else 1.5)
        case str():
            return ast.Constant(f"{value}~")
        case bytes():
            return ast.Constant(value + b"~")
        case list() | tuple():
            return ast.parse(repr(type(value)([*value, 1])), mode="eval").body
        case dict():
            return ast.parse(repr({**value, "~": 1}), mode="eval").body
        case set():
            return ast.parse(repr({*value, "~"}), mode="eval").body
    return ast.Constant("~")  # None or an ellipsis
