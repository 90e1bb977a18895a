"""Hidden tests without their answers: what is right never enters the process that is graded.

`assert area(2, 3) == 6` becomes a report of what `area(2, 3)` is, and whoever judges the report knows the 6 (`run_tests.py`). Taken out are
values that are written in an assertion, in a variable that only the assertion reads, or in a column of `parametrize`: compared by `==`,
`is None`, `in` or approximately. True and False stay, outside of columns: there are only two of them, so hiding one hides little.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from .run_tests import MAX_VALUE

Kind = Literal["equals", "among", "contains", "close"]
Answer = dict[str, Any]
"""`is`: the Kind; `what`: the values as Python literals, by row; `must`: whether every row has to be reported."""

_EQUAL = ("assertEqual", "assertListEqual", "assertTupleEqual", "assertSetEqual", "assertDictEqual", "assertMultiLineEqual")
_METHODS: dict[str, type[ast.cmpop]] = {**dict.fromkeys(_EQUAL, ast.Eq), "assertIn": ast.In, "assertIsNone": ast.Is}
_JUDGES = re.compile(r"assert|check|verify|expect(?!ed)|rais|throw|fail|warn|suppress|skip|approx", re.IGNORECASE)
"""Names of what may decide about a test, or keep an assertion from doing so."""

_AGAIN = re.compile(r"retr[yi]|flaky|eventually|on_exception", re.IGNORECASE)
"""Names of decorators that give a test another try."""

_LETS_THROUGH = frozenset({"open", "StringIO", "BytesIO", "TemporaryDirectory", "NamedTemporaryFile", "patch", "subTest", "context"})
"""Names of context managers that keep no exception to themselves."""

_TELL = """
def tell(index, value, row=0, told=set(), write=__import__("os").write):
    exact = [1]
    def text(value):
        if value is None or value is True or value is False:
            return repr(value)
        for kind in (int, float, complex, str, bytes, list, tuple, set, frozenset, dict):
            if issubclass(type(value), kind):
                exact[0] &= type(value) is kind is not frozenset
                break
        else:
            exact[0] = 0
            if hasattr(value, "__index__"):
                return text(value.__index__())
            if hasattr(value, "as_integer_ratio"):
                top, bottom = value.as_integer_ratio()
                return text(top if bottom == 1 else top / bottom)
            if isinstance(value, (type({}.keys()), type({}.items()))):
                return text(set(value))
            return "..."
        if kind is dict:
            return "{" + "".join(text(key) + ":" + text(part) + "," for key, part in dict.items(value)) + "}"
        if kind in (list, tuple, set, frozenset):
            inner = "".join(text(part) + "," for part in kind.__iter__(value))
            return "[" + inner + "]" if kind is list else "(" + inner + ")" if kind is tuple else "{" + inner + "}" if inner else "set()"
        if kind in (float, complex):
            return "..." if kind.__ne__(value, value) else kind.__repr__(value).replace("inf", "1e999")
        return kind.__repr__(value)
    try:
        line = text(value).encode("ascii", "backslashreplace")
    except Exception:  # whatever it is, it is none of these
        line = b""
    if len(line) > LONGEST:
        line = b""
    line = b"value %d %d %d %s\\n" % (index, row, exact[0] if line else 0, line)
    if line not in told:
        told.add(line)
        write(9, line)
""".replace("LONGEST", str(MAX_VALUE))
"""Writes one line of the report, each only once: exact where the value is made of Python's own types alone. A subclass counts for what it
holds, whatever it says it equals, a number of another kind for what it says it is: knowing that is all there is to know. A part that has
no such form, or is no number (nan), stands there as an ellipsis, which no answer has; what is very long is reported as nothing."""


def teller(name: str) -> str:
    """The code of `_TELL` under a name, out of reach of what a test file calls `set` or `len`."""
    return f"\n{name} = {{}}\n__import__('builtins').exec({_TELL!r}, {name})\n{name} = {name}['tell']\n"


Column = list[tuple[list[ast.expr], int, ast.expr]]
"""A cell for each row: the list and the place where it is written, and what stands there."""


@dataclass(frozen=True)
class Around:
    """What matters of the rest of a test file."""

    helpers: Set[str] = frozenset()
    """What asserts something itself, or by what it mentions."""
    catching: Set[str] = frozenset()
    """Functions that keep exceptions to themselves: as a decorator, what a test fails with."""
    fixtures: Set[str] = frozenset()
    """Arguments of fixtures: what a test is parametrised with may be meant for them."""
    tables: Mapping[str, ast.List | ast.Tuple] = field(default_factory=dict)
    """Lists that one place reads and no other, by name."""


def seal(test: ast.FunctionDef, name: str, answers: list[Answer], around: Around) -> bool:
    """Take the answers out of `test`, in place, and append them to `answers`; `name` is the function that reports by their index.

    Returns whether nothing but the answers decides about the test.
    """
    if may_return(test) or any(name in around.catching or _AGAIN.search(name) for mark in test.decorator_list for name in names(mark)):
        return False
    before = len(answers)
    sealing = _Sealing(test, name, answers, around)
    test.body = sealing.block(test.body, certain=True)
    return sealing.whole and any(answer["must"] for answer in answers[before:])


def tables(scope: ast.Module | ast.FunctionDef) -> dict[str, ast.List | ast.Tuple]:
    mentioned = Counter(node.id for node in ast.walk(scope) if isinstance(node, ast.Name))
    found = {}
    for statement in scope.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List() | ast.Tuple() as rows) if mentioned[name] == 2:
                found[name] = rows
    return found


def may_return(node: ast.AST) -> bool:
    """Of its own accord: what a function within it returns is another matter."""
    inner = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(isinstance(child, ast.Return) or may_return(child) for child in inner)


def names(node: ast.AST) -> Iterator[str]:
    """Of everything that it mentions."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.arg):
            yield part.arg


def judged(nodes: Sequence[ast.AST], helpers: Set[str]) -> bool:
    """Whether they may decide about a test."""
    return any(isinstance(part, ast.Assert | ast.Raise) for node in nodes for part in ast.walk(node)) or any(
        name in helpers or _JUDGES.search(name) for node in nodes for name in names(node)
    )


class _Sealing:
    def __init__(self, test: ast.FunctionDef, name: str, answers: list[Answer], around: Around) -> None:
        self.name = name
        self.answers = answers
        self.helpers = around.helpers
        self.tables = {**around.tables, **tables(test)}
        self.whole = not self._judged([test.args])
        mentioned = [node for node in ast.walk(test) if isinstance(node, ast.Name)]
        read = Counter(node.id for node in mentioned if isinstance(node.ctx, ast.Load))
        written = Counter(node.id for node in mentioned if not isinstance(node.ctx, ast.Load))
        self.columns = {
            key: cells
            for key, cells in self._columns(test)
            if read[key] == 1 and written[key] == (key not in {argument.arg for argument in test.args.args}) and key not in around.fixtures
        }
        self.constants = {
            target.id: statement
            for statement in test.body
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(target := statement.targets[0], ast.Name)
            if read[target.id] == 1 and written[target.id] == 1
        }

    def block(self, statements: list[ast.stmt], certain: bool) -> list[ast.stmt]:
        new: list[ast.stmt] = []
        for statement in statements:
            conditions = _conditions(statement, self.helpers)
            if conditions:
                new += [self._report(condition, statement, certain) for condition in conditions]
                continue
            if self._entered(statement):
                statement.body = self.block(statement.body, certain and self._certain(statement))
            elif self._judged([statement]):
                self.whole = False
            new.append(statement)
        return new

    def _entered(self, statement: ast.stmt) -> TypeGuard[ast.For | ast.With | ast.Try]:
        """Whether it does its body and nothing else that decides."""
        match statement:
            case ast.For(iter=values, orelse=[]):
                return not self._judged([values])
            case ast.With():
                return self._certain(statement)
            case ast.Try(handlers=[], orelse=[], finalbody=last):
                return not self._judged(last)
        return False

    def _certain(self, block: ast.For | ast.With | ast.Try) -> bool:
        """Whether all of its body is done, for every row if it has any, in a test that passes."""
        match block:
            case ast.With(items=items):
                calls = [item.context_expr.func for item in items if isinstance(item.context_expr, ast.Call)]
                return len(calls) == len(items) and all(_LETS_THROUGH & {*names(call)} for call in calls)
            case ast.For(iter=table):
                leaves = any(isinstance(part, ast.Break | ast.Continue) for part in ast.walk(block))
                return any(not isinstance(row, ast.Starred) for row in self._rows(table)) and not leaves
        return True

    def _rows(self, table: ast.expr) -> list[ast.expr]:
        written = self.tables.get(table.id) if isinstance(table, ast.Name) else table
        return written.elts if isinstance(written, ast.List | ast.Tuple) else []

    def _columns(self, test: ast.FunctionDef) -> Iterator[tuple[str, Column]]:
        """Of `parametrize`, and of loops over what is written."""
        for node in ast.walk(test):
            match node:
                case ast.Call(func=ast.Attribute(attr="parametrize"), args=[heads, table], keywords=[] | [ast.keyword("ids", ast.List())]):
                    columns, bare = _heads(heads)
                case ast.For(target=ast.Name(id=name), iter=table):
                    columns, bare = [name], True
                case ast.For(target=ast.Tuple(elts=heads), iter=table):
                    columns, bare = [head.id if isinstance(head, ast.Name) else "" for head in heads], False
                case _:
                    continue
            rows = self._rows(table)
            for place, column in enumerate(columns):
                cells = [cell for number in range(len(rows)) if (cell := _cell(rows, number, place, len(columns), bare))]
                if len(cells) == len(rows):
                    yield column, cells

    def _report(self, condition: ast.expr, statement: ast.stmt, certain: bool) -> ast.stmt:
        found = self._answer(condition) if isinstance(condition, ast.Compare) and len(condition.ops) == 1 else None
        self.whole &= found is not None and certain
        if found is None or (not certain and found[0] != "equals"):
            return ast.Assert(condition) if isinstance(statement, ast.Assert) else statement
        kind, value, right, take_out = found
        self.answers.append({"is": kind, "what": right, "must": certain})
        call = ast.Call(ast.Name(self.name, ast.Load()), [ast.Constant(len(self.answers) - 1), value, *take_out()], [])
        return ast.Expr(call)

    def _answer(self, found: ast.Compare) -> tuple[Kind, ast.expr, list[str], Callable[[], list[ast.expr]]] | None:
        """How, what is reported, what is right by row, and what takes that out of the test: it returns what names the row."""
        left, operator, right = found.left, found.ops[0], found.comparators[0]
        if isinstance(operator, ast.Eq | ast.Is):
            for value, expected in ((left, right), (right, left)):
                if (known := self._known(expected)) and (isinstance(operator, ast.Eq) or known[0] == ["None"]):
                    return "equals", value, *known
                if isinstance(operator, ast.Eq) and (numbers := _approximately(expected)):
                    return "close", value, [numbers], list
        if isinstance(operator, ast.In):
            if isinstance(right, ast.List | ast.Tuple | ast.Set) and (known := self._known(right)):
                return "among", left, *known
            if not isinstance(right, ast.Constant | ast.Dict) and (known := self._known(left)) and known[0] not in (["''"], ["b''"]):
                return "contains", right, *known
        return None

    def _known(self, expected: ast.expr) -> tuple[list[str], Callable[[], list[ast.expr]]] | None:
        if isinstance(expected, ast.Name) and expected.id in self.columns:
            cells = self.columns[expected.id]
            texts = [_literal(cell) for _, _, cell in cells]
            if not texts or None in texts or {*texts} in ({"True"}, {"False"}):
                return None

            def number_rows() -> list[ast.expr]:
                for number, (row, place, _) in enumerate(cells):
                    row[place] = ast.Constant(number)
                return [expected]

            return [text for text in texts if text is not None], number_rows
        statement = self.constants.get(expected.id) if isinstance(expected, ast.Name) else None
        text = _literal(statement.value if statement else expected)
        if text is None or text in ("True", "False"):
            return None

        def forget() -> list[ast.expr]:
            if statement:
                statement.value = ast.Constant(None)
            return []

        return [text], forget

    def _judged(self, nodes: Sequence[ast.AST]) -> bool:
        return judged(nodes, self.helpers)


def _conditions(statement: ast.stmt, helpers: Set[str]) -> list[ast.expr]:
    """What an assertion demands, one by one; nothing for another statement."""
    match statement:
        case ast.Assert(test=ast.BoolOp(op=ast.And(), values=values)):
            return values
        case ast.Assert(test=test):
            return [test]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=method), args=arguments)) if (
            method in _METHODS and method not in helpers
        ):
            if method == "assertIsNone" and arguments:
                return [ast.Compare(arguments[0], [ast.Is()], [ast.Constant(None)])]
            if len(arguments) >= 2 and not any(isinstance(argument, ast.Starred) for argument in arguments):
                return [ast.Compare(arguments[0], [_METHODS[method]()], [arguments[1]])]
    return []


def _literal(value: ast.expr) -> str | None:
    text = ast.unparse(value)
    try:
        ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return None if any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(value)) else text


def _approximately(expected: ast.expr) -> str | None:
    """(number or numbers, relative tolerance, absolute tolerance), None for what is not given."""
    match expected:
        case ast.Call(func=ast.Name(id="approx") | ast.Attribute(attr="approx"), args=[number], keywords=keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            if given.keys() <= {"rel", "abs"}:
                none = ast.Constant(None)
                return _literal(ast.Tuple([number, given.get("rel", none), given.get("abs", none)], ast.Load()))
    return None


def _heads(heads: ast.expr) -> tuple[list[str], bool]:
    """Names, and whether there is one whose values stand for themselves instead of in tuples."""
    try:
        value = ast.literal_eval(heads)
    except ValueError:
        return [], False
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else list(value)
    return names, isinstance(value, str) and len(names) == 1


def _cell(rows: list[ast.expr], number: int, place: int, width: int, bare: bool) -> tuple[list[ast.expr], int, ast.expr] | None:
    match rows[number]:
        case ast.Call(func=ast.Name(id="param") | ast.Attribute(attr="param"), args=cells, keywords=more):
            known = len(cells) == width and all(keyword.arg == "id" for keyword in more)
            return (cells, place, cells[place]) if known else None
        case _ if bare:
            return rows, number, rows[number]
        case ast.Tuple(elts=cells) | ast.List(elts=cells) if len(cells) == width:
            return cells, place, cells[place]
    return None
