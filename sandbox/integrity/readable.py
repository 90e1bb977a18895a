"""Hidden tests that the grader cannot see or judge: a task with such a test is refused before any trial, with what to change.

A test that it does not see would be one that nobody has to pass; one that does not pass honestly would fail every trial.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

_NEVER_PASS = frozenset({"skip", "xfail", "expectedFailure"})


def tests(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Test functions by the name that pytest gives them, methods of test classes included. Of several of one name the last is it."""
    last = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in last.values():
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and _collected(node):
            yield from tests(node, f"{prefix}{node.name}::")


def unfit(trees: Mapping[str, ast.Module], helpers: Mapping[str, ast.Module]) -> str | None:
    """What is wrong with the tests, in words. `helpers` are the other Python files beside them."""
    everything = [*trees.values(), *helpers.values()]
    classes = [node for tree in everything for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    with_tests = {node.name for node in classes if any(True for _ in _own_tests(node))}
    for name, tree in helpers.items():
        if name.endswith("_test.py") and any(True for _ in tests(tree)):
            return f"tests/{name} would not be run: call it test_*.py"
    for name, tree in trees.items():
        for line, words in _problems(tree, with_tests):
            return f"tests/{name}, line {line}: {words}"
    return None


def _problems(tree: ast.Module | ast.ClassDef, with_tests: Set[str]) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _collected(node):
            yield from _class_problems(node, with_tests)
            yield from _problems(node, with_tests)
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.lineno, f"{node.name} is async, which needs a plug-in that graders have not: let it call asyncio.run"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (mark := _mark(node.decorator_list)):
            yield node.lineno, f"{node.name} is marked {mark}, but every test has to pass: take it out, or the mark"
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.If | ast.Try | ast.With | ast.For):
            yield from _hidden(node)


def _class_problems(node: ast.ClassDef, with_tests: Set[str]) -> Iterator[tuple[int, str]]:
    for parent in _bases(node):
        if parent in with_tests:
            yield node.lineno, f"{node.name} has the tests of {parent}, which the grader does not see in it: write them in each class"
    if any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in node.body):
        yield node.lineno, f"{node.name} has a constructor, so that pytest leaves it out"


def _hidden(node: ast.stmt) -> Iterator[tuple[int, str]]:
    """Tests that come about in another way than by a function of the file or of a class."""
    match node:
        case ast.Assign(targets=targets):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if "pytestmark" in names and (mark := _mark([node.value])):
                yield node.lineno, f"pytestmark has {mark}, but every test has to pass: take them out, or the mark"
        case ast.AnnAssign(target=ast.Name(id=name)):
            names = [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            names = [alias.asname or alias.name for alias in aliases]
            names = [name for name in names if isinstance(node, ast.ImportFrom)]
        case _:
            inner = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
            names = [part.name for part in inner]
    for name in names:
        if name.startswith("test"):
            yield node.lineno, f"{name} is no function of the file or of a class, so that the grader does not see it: write it as one"


def _collected(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in _bases(node))


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id if isinstance(base, ast.Name) else base.attr for base in node.bases if isinstance(base, ast.Name | ast.Attribute)]


def _own_tests(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test"):
            yield part.name


def _mark(decorators: list[ast.expr]) -> str | None:
    for decorator in decorators:
        for part in ast.walk(decorator):
            name = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
            if name in _NEVER_PASS:
                return name
    return None
