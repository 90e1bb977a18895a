"""Hidden pytest tests of a task: the check that runs them, and twins of the tests that no honest tree can pass.

The tests import the graded code into their own process, where it can change what the test runner says. A tree that passed is therefore
graded twice more, each time in a fresh sandbox (`run_tests.py` says how a report is judged). In a twin some tests cannot pass, and each of
them must fail:

* Quietly changed: the last assertion as no honest run can meet it, but as somebody might have written it (another value, the opposite
  operator). Each test that can be is changed in one of the twins, by chance; in twin A the others are as they were and must pass. Who does
  not know what is right cannot tell which. All variants are written out anew, so that nothing shows by its form.
* What has no such assertion gets a false one at its end in twin A. In twin B what is not changed quietly there gets a function around what
  it compares with. Code that looks for either can tell; these stop code that does not.

A twin that does not come out so shows that the report, or the value under test, does not depend on the assertion.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .untrue import untrue

DIRECTORY = "tests"
"""Where tests lie below the work directory while they run."""
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST_AT = "/opt/grader"
_PROGRAM = Path(__file__).with_name("run_tests.py")
_NOT_UPLOADED = ("test.sh", "check.py", "Dockerfile")

Variant = Literal["tests", "twin A", "twin B"]
VARIANTS: tuple[Variant, ...] = ("tests", "twin A", "twin B")
_CHANCE = secrets.SystemRandom()
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


def checks(task: Path) -> dict[Variant, str | None]:
    """The check program of every variant; None where no test of the task can be changed so. Raises NoTests."""
    files = {
        str(path.relative_to(task / "tests")): path.read_bytes()
        for path in sorted((task / "tests").rglob("*"))
        if path.is_file() and path.name not in _NOT_UPLOADED
    }
    sources = {name: data.decode() for name, data in files.items() if Path(name).match("test_*.py")}
    trees = {name: _parse(task, name, source) for name, source in sources.items()}
    if not any(True for tree in trees.values() for _ in _tests(tree)):
        raise NoTests(f"task {task.name} has no test function in tests/test_*.py")
    # A hook of the task's own may let one test decide about the next, and a test may call another one.
    around = [path.read_bytes() for path in (task / "environment" / "workspace").glob("conftest.py")]
    hooks = any(b"pytest_runtest" in data for data in (*files.values(), *around))
    named = Counter(name for tree in trees.values() for node in ast.walk(tree) for name in _names(node))
    split = {
        f"{name}::{key}": _CHANCE.choice(("twin A", "twin B"))
        for name, tree in trees.items()
        for key, test in _tests(tree)
        if not hooks and not named[test.name] and _quiet(test) is not None
    }
    return {variant: _check(files, trees, variant, split) for variant in VARIANTS}


def _check(files: Mapping[str, bytes], trees: Mapping[str, ast.Module], variant: Variant, split: Mapping[str, str]) -> str | None:
    nonce = secrets.token_hex(6)
    expected: dict[str, str] = {}
    written = dict(files)
    for name, pristine in trees.items():
        tree = copy.deepcopy(pristine)
        for key, test in _tests(tree):
            twin = split.get(f"{name}::{key}")
            changed = variant != "tests" and _change(test, variant, twin, f"_{nonce}")
            expected[f"{name}::{key}"] = "failed" if changed else "passed"
        source = ast.unparse(ast.fix_missing_locations(tree))
        written[name] = (source + _CHANGED.format(name=f"_{nonce}") if f"_{nonce}(" in source else source + "\n").encode()
    if variant != "tests" and "failed" not in expected.values():
        return None
    if variant != "tests":
        # A quiet change and a false assertion at the end skip nothing that a test does; others fail early, and a test may lean on what
        # another one did before it.
        early = any(f"_{nonce}(".encode() in data for data in written.values())
        expected = {key: outcome for key, outcome in expected.items() if outcome == "failed" or (key in split and not early)}
    sentinel = f"test_{nonce}.py"
    written[sentinel] = b"def test_1():\n    assert 1 == 1\n\n\ndef test_2():\n    assert 1 == 2\n"
    plan: dict[str, Any] = {
        "directory": DIRECTORY,
        "files": written,
        "run": [*trees, sentinel],
        "tests": expected,
        "sentinels": {f"{sentinel}::test_1": "passed", f"{sentinel}::test_2": "failed"},
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


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name():
            yield node.id
        case ast.Attribute():
            yield node.attr


def _change(test: ast.FunctionDef, variant: Variant, quiet_in: str | None, name: str) -> bool:
    """Make `test` one that no honest run can pass; False where it stays as it is. `name` is the function that changes a value."""
    if quiet_in == variant:
        last, false = test.body[-1], _quiet(test)
        assert isinstance(last, ast.Assert) and false is not None  # noqa: S101 -- or it would be in no twin
        last.test = false
    elif variant == "twin B":
        loud = _compared(test)
        for comparison in loud:
            comparison.comparators[-1] = ast.Call(ast.Name(name, ast.Load()), [comparison.comparators[-1]], [])
        return bool(loud)
    elif quiet_in is None:
        number = _CHANCE.randrange(10, 99)
        test.body = [ast.Try(test.body, [], [], ast.parse(f"assert {number} == {number + 1}").body)]
    else:
        return False
    return True


def _compared(test: ast.FunctionDef) -> list[ast.Compare]:
    """Comparisons by `==` with what shows nowhere as a value, that an honest run certainly reaches: unless it may return early."""
    if _may_return(test):
        return []
    asserted = [statement.test for statement in test.body if isinstance(statement, ast.Assert)]
    first = [found.values[0] if isinstance(found, ast.BoolOp) and isinstance(found.op, ast.And) else found for found in asserted]
    return [
        found for found in first if isinstance(found, ast.Compare) and isinstance(found.ops[-1], ast.Eq) and untrue(found, _CHANCE) is None
    ]


def _quiet(test: ast.FunctionDef) -> ast.expr | None:
    """The last assertion made false, where it is the last thing that the test does: whatever it does beside, it goes on doing."""
    last = test.body[-1]
    return untrue(last.test, _CHANCE) if isinstance(last, ast.Assert) and not _may_return(test) else None


def _may_return(test: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Return) for node in ast.walk(test))
