"""Hidden pytest tests of a task: the check that runs them, and variants of them that only honest code passes.

The tests import the graded code into their own process, where it can read them and change what the test runner says. So a tree is graded
several times, each time in a fresh sandbox, and `run_tests.py` says how a report is judged:

* First without the answers (`seal.py`): tests report what they would compare, and what is right is known outside only. Code that has not
  seen it in any run so far has to work it out, which is the task. A test of which nothing else decides needs no twins.
* Then the tests as they are.
* Then twins, for the other tests. In a twin some tests cannot pass, and each of them must fail.

Quiet twins come in pairs. A test whose last assertion can be made false as somebody might have written it (another value, the opposite
operator) is so in one of a pair, by chance, and as it was in the other, where it must pass. Who does not know what is right has to guess
which. All variants are written out anew without messages, and quiet twins have no other change, so that little shows by its form.

In twin A what has no such assertion gets a false one at its end. In twin B what is compared with a computed value gets a function around
it. Code that looks for either can tell; these stop code that does not.

A twin that does not come out so shows that the report, or the value under test, does not depend on the assertion.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from .readable import tests, unfit
from .seal import Answer, Around, judged, may_return, names, seal, tables, teller
from .untrue import untrue

DIRECTORY = "tests"
"""Where tests lie below the work directory while they run."""
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST_AT = "/opt/grader"
_RUN_TESTS = Path(__file__).with_name("run_tests.py")
_NOT_UPLOADED = ("test.sh", "check.py", "Dockerfile")

Variant = Literal["sealed", "tests", "twin A", "twin B", "twin C", "twin D", "twin E", "twin F"]
LOUD: tuple[Variant, ...] = ("twin A", "twin B")
PAIRS: tuple[tuple[Variant, Variant], ...] = (("twin C", "twin D"), ("twin E", "twin F"))
TWINS: tuple[Variant, ...] = (*LOUD, *(twin for pair in PAIRS for twin in pair))
_CHANCE = secrets.SystemRandom()
_HOOKS = (b"pytest_runtest", b"pytest_pyfunc_call")
_UNASKED = re.compile(r"set_?up|tear_?down|pytest_", re.IGNORECASE)
"""Names of functions that are called around every test."""
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


def look(task: Path) -> None:
    """Raises NoTests for a task whose hidden tests cannot be graded."""
    if has_tests(task) and not (task / "tests" / "check.py").exists():
        _read(task)


def checks(task: Path, sealed: bool = True) -> dict[Variant, str | None]:
    """The check program of every variant; None where no test of the task can be changed so. Raises NoTests.

    Where not `sealed`, the tests keep their answers and all need twins: for what compares objects that have no plain form.
    """
    files, trees = _read(task)
    # A hook of the task's own may let one test decide about the next, and a test may call another one.
    workspace = task / "environment" / "workspace"
    places = [path for path in (workspace / "conftest.py", *workspace.glob("tests/**/*.py")) if path.is_file()]
    around = {str(path): path.read_bytes() for path in places}
    hooks = any(hook in data for data in (*files.values(), *around.values()) for hook in _HOOKS)
    named = Counter(name for tree in trees.values() for name in names(tree))
    blind, answers, whole = _sealed(files, trees, _helpers({**around, **files})) if sealed else (None, [], set())
    quiet = {
        f"{name}::{key}"
        for name, tree in trees.items()
        for key, test in tests(tree)
        if not hooks and not named[test.name] and f"{name}::{key}" not in whole and _quiet(test) is not None
    }
    false: dict[Variant, set[str]] = {}
    for one, other in PAIRS:
        false[one] = {key for key in quiet if _CHANCE.random() < 0.5}
        false[other] = quiet - false[one]
    twins = {variant: _check(files, trees, variant, whole, quiet, false.get(variant, set())) for variant in ("tests", *TWINS)}
    return {"sealed": blind if answers else None, **twins}


def _read(task: Path) -> tuple[dict[str, bytes], dict[str, ast.Module]]:
    """Every file that the tests come with, and those with tests as trees. Raises NoTests for what cannot be graded."""
    files = {
        str(path.relative_to(task / "tests")): path.read_bytes()
        for path in sorted((task / "tests").rglob("*"))
        if path.is_file() and path.name not in _NOT_UPLOADED
    }
    trees = {name: _parse(task, name, data) for name, data in files.items() if Path(name).match("test_*.py")}
    if problem := unfit(trees, _helpers(files)):
        raise NoTests(f"task {task.name}: {problem}")
    if not any(True for tree in trees.values() for _ in tests(tree)):
        raise NoTests(f"task {task.name} has no test function in tests/test_*.py")
    return files, trees


def _sealed(
    files: Mapping[str, bytes], trees: Mapping[str, ast.Module], beside: Mapping[str, ast.Module]
) -> tuple[str, list[Answer], set[str]]:
    """The check of the tests without their answers, the answers, and the tests that are decided by them alone."""
    nonce = secrets.token_hex(6)
    everything = [*trees.values(), *beside.values()]
    helpers = _deciding(everything)
    functions = [node for tree in everything for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    catching = {function.name for function in functions if any(isinstance(part, ast.ExceptHandler) for part in ast.walk(function))}
    fixtures = {
        argument.arg
        for function in functions
        if any("fixture" in names(decorator) for decorator in function.decorator_list)
        for argument in function.args.args
    }
    unasked = any(_unasked(tree, helpers) for tree in beside.values())
    answers: list[Answer] = []
    whole: set[str] = set()
    written, expected = dict(files), dict[str, str]()
    for name, pristine in trees.items():
        tree = copy.deepcopy(pristine)
        around = Around(helpers, catching, fixtures, tables(tree))
        for key, test in tests(tree):
            _tell_nothing(test)
            before = len(answers)
            if seal(test, f"_{nonce}", answers, around) and not unasked and not _unasked(pristine, helpers):
                whole.add(f"{name}::{key}")
            for answer in answers[before:]:
                answer["test"] = f"{name}::{key}"
            expected[f"{name}::{key}"] = "passed"
        written[name] = (ast.unparse(ast.fix_missing_locations(tree)) + teller(f"_{nonce}")).encode()
    return _program(written, trees, expected, nonce, answers), answers, whole


def _helpers(files: Mapping[str, bytes]) -> dict[str, ast.Module]:
    """Python files beside the tests; what is no Python by its content is data."""
    found = {}
    for name, data in files.items():
        if name.endswith(".py") and not Path(name).match("test_*.py"):
            with contextlib.suppress(SyntaxError, ValueError):
                found[name] = ast.parse(data)
    return found


def _deciding(trees: Collection[ast.Module]) -> set[str]:
    """Names of functions and classes that may decide about a test, by what they mention, too, and other names for them."""
    named: list[tuple[str, ast.AST]] = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(("test", "Test")):
                named.append((node.name, node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                named += [(alias.asname, ast.Name(alias.name)) for alias in node.names if alias.asname]
        for node in tree.body:
            if isinstance(node, ast.Assign):
                named += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    found: set[str] = set()
    while more := {name for name, node in named if name not in found and judged([node], found)}:
        found |= more
    return found


def _unasked(tree: ast.Module, helpers: Set[str]) -> bool:
    """Whether something decides about tests that do not mention it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name, decorator_list=decorators) | ast.AsyncFunctionDef(name=name, decorator_list=decorators):
                unasked = any(isinstance(part, ast.keyword) and part.arg == "autouse" for mark in decorators for part in ast.walk(mark))
                if name in helpers and (unasked or _UNASKED.match(name)):
                    return True
            case ast.Call(func=ast.Attribute(attr="usefixtures"), args=fixtures):
                if any(isinstance(fixture, ast.Constant) and fixture.value in helpers for fixture in fixtures):
                    return True
    return False


def _check(
    files: Mapping[str, bytes], trees: Mapping[str, ast.Module], variant: Variant, whole: Set[str], quiet: Set[str], false: Set[str]
) -> str | None:
    """`whole` are the tests that need no twin, `quiet` those that can be changed quietly, `false` those that are in this twin."""
    nonce = secrets.token_hex(6)
    expected: dict[str, str] = {}
    written = dict(files)
    for name, pristine in trees.items():
        tree = copy.deepcopy(pristine)
        for key, test in tests(tree):
            _tell_nothing(test)
            full = f"{name}::{key}"
            changed = full not in whole and _change(test, variant, full in quiet, full in false, f"_{nonce}")
            expected[full] = "failed" if changed else "passed"
        source = ast.unparse(ast.fix_missing_locations(tree))
        written[name] = (source + _CHANGED.format(name=f"_{nonce}") if f"_{nonce}(" in source else source + "\n").encode()
    if variant != "tests" and not ("failed" in expected.values() if variant in LOUD else quiet):
        return None
    if variant != "tests":
        # What fails before its end may be what another test leans on; nothing else skips what a test does.
        expected = {key: outcome for key, outcome in expected.items() if outcome == "failed" or (key in quiet and variant != "twin B")}
    return _program(written, trees, expected, nonce, [])


def _program(files: Mapping[str, bytes], run: Collection[str], expected: Mapping[str, str], nonce: str, answers: list[Answer]) -> str:
    sentinel = f"test_{nonce}.py"
    plan: dict[str, Any] = {
        "directory": DIRECTORY,
        "files": {**files, sentinel: b"def test_1():\n    assert 1 == 1\n\n\ndef test_2():\n    assert 1 == 2\n"},
        "run": [*run, sentinel],
        "tests": dict(expected),
        "answers": answers,
        "sentinels": {f"{sentinel}::test_1": "passed", f"{sentinel}::test_2": "failed"},
        "pytest": PYTEST_AT,
    }
    return f"PLAN = {plan!r}\n{_text()}"


@functools.cache
def _text() -> str:
    return _RUN_TESTS.read_text(encoding="utf-8")


def _parse(task: Path, name: str, source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise NoTests(f"task {task.name}: tests/{name} is not Python: {error}") from error


def _tell_nothing(test: ast.FunctionDef) -> None:
    """What a test says about itself would give away what is right."""
    if ast.get_docstring(test, clean=False) is not None and len(test.body) > 1:
        del test.body[0]
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            node.msg = None


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
    if may_return(test):
        return []
    asserted = [statement.test for statement in test.body if isinstance(statement, ast.Assert)]
    first = [found.values[0] if isinstance(found, ast.BoolOp) and isinstance(found.op, ast.And) else found for found in asserted]
    return [
        found for found in first if isinstance(found, ast.Compare) and isinstance(found.ops[-1], ast.Eq) and untrue(found, _CHANCE) is None
    ]


def _quiet(test: ast.FunctionDef) -> ast.expr | None:
    """The last assertion made false, where it is the last thing that the test does: whatever it does beside, it goes on doing."""
    last = test.body[-1]
    return untrue(last.test, _CHANCE) if isinstance(last, ast.Assert) and not may_return(test) else None
