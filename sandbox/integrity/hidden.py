"""Hidden pytest tests of a task: the check that runs them, and twins of the tests that no honest tree can pass.

The tests import the graded code into their own process, where it can change what the test runner says. A tree that passed is therefore
graded again with each twin, in a fresh sandbox (`run_tests.py` says how a report is judged). In a twin some tests cannot pass, and each of
them must fail:

* Quiet twins come in pairs. A test whose last assertion can be made false as somebody might have written it (another value, the opposite
  operator) is so in one of a pair, by chance, and as it was in the other, where it must pass. Who does not know what is right has to guess
  which. All variants are written out anew without messages, and quiet twins have no other change, so that little shows by its form.
* In twin A what has no such assertion gets a false one at its end. In twin B what is compared with a computed value gets a function around
  it. Code that looks for either can tell; these stop code that does not.

A twin that does not come out so shows that the report, or the value under test, does not depend on the assertion.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from .untrue import untrue

DIRECTORY = "tests"
"""Where tests lie below the work directory while they run."""
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST_AT = "/opt/grader"
_PROGRAM = Path(__file__).with_name("run_tests.py")
_NOT_UPLOADED = ("test.sh", "check.py", "Dockerfile")

Variant = Literal["tests", "twin A", "twin B", "twin C", "twin D", "twin E", "twin F"]
LOUD: tuple[Variant, ...] = ("twin A", "twin B")
PAIRS: tuple[tuple[Variant, Variant], ...] = (("twin C", "twin D"), ("twin E", "twin F"))
TWINS: tuple[Variant, ...] = (*LOUD, *(twin for pair in PAIRS for twin in pair))
_CHANCE = secrets.SystemRandom()
_HOOKS = (b"pytest_runtest", b"pytest_pyfunc_call")
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
    workspace = task / "environment" / "workspace"
    around = [path.read_bytes() for path in (workspace / "conftest.py", *workspace.glob("tests/**/conftest.py")) if path.is_file()]
    hooks = any(hook in data for data in (*files.values(), *around) for hook in _HOOKS)
    named = Counter(name for tree in trees.values() for node in ast.walk(tree) for name in _names(node))
    quiet = {
        f"{name}::{key}"
        for name, tree in trees.items()
        for key, test in _tests(tree)
        if not hooks and not named[test.name] and _quiet(test) is not None
    }
    false: dict[Variant, set[str]] = {}
    for one, other in PAIRS:
        false[one] = {key for key in quiet if _CHANCE.random() < 0.5}
        false[other] = quiet - false[one]
    return {variant: _check(files, trees, variant, quiet, false.get(variant, set())) for variant in ("tests", *TWINS)}


def _check(files: Mapping[str, bytes], trees: Mapping[str, ast.Module], variant: Variant, quiet: Set[str], false: Set[str]) -> str | None:
    """`quiet` are the tests that can be changed so, `false` those that are in this twin."""
    nonce = secrets.token_hex(6)
    expected: dict[str, str] = {}
    written = dict(files)
    for name, pristine in trees.items():
        tree = copy.deepcopy(pristine)
        for key, test in _tests(tree):
            _tell_nothing(test)
            changed = _change(test, variant, f"{name}::{key}" in quiet, f"{name}::{key}" in false, f"_{nonce}")
            expected[f"{name}::{key}"] = "failed" if changed else "passed"
        source = ast.unparse(ast.fix_missing_locations(tree))
        written[name] = (source + _CHANGED.format(name=f"_{nonce}") if f"_{nonce}(" in source else source + "\n").encode()
    if variant != "tests" and not ("failed" in expected.values() if variant in LOUD else quiet):
        return None
    if variant != "tests":
        # What fails before its end may be what another test leans on; nothing else skips what a test does.
        expected = {key: outcome for key, outcome in expected.items() if outcome == "failed" or (key in quiet and variant != "twin B")}
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
    """Test functions by the name that pytest gives them, methods of `Test*` classes included. Of several of one name the last is it."""
    last = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and last[node.name] is node:
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests(node, f"{prefix}{node.name}::")


def _tell_nothing(test: ast.FunctionDef) -> None:
    """What a test says about itself would give away what is right."""
    if ast.get_docstring(test, clean=False) is not None and len(test.body) > 1:
        del test.body[0]
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            node.msg = None


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name():
            yield node.id
        case ast.Attribute():
            yield node.attr


def _change(test: ast.FunctionDef, variant: Variant, quiet: bool, false: bool, name: str) -> bool:
    """Make `test` one that no honest run can pass; False where it stays as it is. `name` is the function that changes a value."""
    if false:
        last, condition = test.body[-1], _quiet(test)
        assert isinstance(last, ast.Assert) and condition is not None  # noqa: S101 -- or it would not be among them
        last.test = condition
        return True
    if variant == "twin A" and not quiet:
        number = _CHANCE.randrange(10, 99)
        test.body = [ast.Try(test.body, [], [], ast.parse(f"assert {number} == {number + 1}").body)]
        return True
    loud = _compared(test) if variant == "twin B" else []
    for comparison in loud:
        comparison.comparators[-1] = ast.Call(ast.Name(name, ast.Load()), [comparison.comparators[-1]], [])
    return bool(loud)


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


def _may_return(node: ast.AST) -> bool:
    """Of its own accord: what a function within it returns is another matter."""
    inner = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(isinstance(child, ast.Return) or _may_return(child) for child in inner)
