"""An assertion as no honest run can meet it, and as somebody might well have written it.

`untrue` is given what an honest tree meets. Its answer is of the same kind and size, and nothing is there that was not there before; what
is usually right all the same (a round number, a word that is spelt well) it may still give away. Empty values and None have no such answer.
"""

from __future__ import annotations

import ast
import math
import string
from collections.abc import Sequence
from random import Random
from types import EllipsisType

_Literal = str | bytes | bool | int | float | complex | EllipsisType | None

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ALPHABETS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
_TRIES = 50
_PUNCTUATION = ".,;:-_/ "


def untrue(condition: ast.expr, chance: Random) -> ast.expr | None:
    """None where that cannot be had."""
    match condition:
        case ast.BoolOp(op=ast.And(), values=[*others, last]):  # the last, so that all of it is done as before
            changed = untrue(last, chance)
            return None if changed is None else ast.BoolOp(ast.And(), [*others, changed])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare():
            return _comparison(condition, chance)
    return ast.UnaryOp(ast.Not(), condition)


def _comparison(found: ast.Compare, chance: Random) -> ast.Compare | None:
    """The last link of a chain: one that does not hold is enough."""
    operator, expected = found.ops[-1], found.comparators[-1]
    earlier = found.comparators[:-1]
    if isinstance(operator, ast.Eq):
        if (value := other(expected, chance)) is not None:
            return ast.Compare(found.left, found.ops, [*earlier, value])
        value = other(found.left, chance) if len(found.ops) == 1 else None
        return None if value is None else ast.Compare(value, found.ops, found.comparators)
    if isinstance(operator, ast.In) and (strangers := _strangers(expected, chance)) is not None:
        return ast.Compare(found.left, found.ops, [*earlier, strangers])
    return ast.Compare(found.left, [*found.ops[:-1], _OPPOSITE[type(operator)]()], found.comparators)


def _strangers(container: ast.expr, chance: Random) -> ast.expr | None:
    if not isinstance(container, ast.List | ast.Tuple | ast.Set):
        return None
    known = [node.value for node in container.elts if isinstance(node, ast.Constant)]
    if len(known) < len(container.elts) or not known:
        return None
    for _ in range(_TRIES):
        values = [_another(value, chance) for value in known]
        if not any(value in known for value in values):
            return _container(container, [ast.Constant(value) for value in values])
    return None


def _container(like: ast.List | ast.Tuple | ast.Set, parts: list[ast.expr]) -> ast.expr:
    return ast.Set(parts) if isinstance(like, ast.Set) else type(like)(elts=parts, ctx=ast.Load())


def other(value: ast.expr, chance: Random) -> ast.expr | None:
    """Another value, equal to `value` in no case; None for one that does not show, at least in part."""
    match value:
        case ast.Constant(value=None | EllipsisType() | "" | b""):
            return None
        case ast.Constant():
            return ast.Constant(_another(value.value, chance))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return ast.UnaryOp(ast.USub(), ast.Constant(_another(abs(number), chance)))
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            parts = _one_other(elements, chance)
            return None if parts is None else _container(value, parts)
        case ast.Dict(keys=keys, values=values):
            known = {key.value for key in keys if isinstance(key, ast.Constant)}
            parts = _one_other(values, chance) if len(known) == len(keys) else None
            return None if parts is None else ast.Dict(keys, parts)
        case ast.Call(func=ast.Name(id="approx") | ast.Attribute(attr="approx"), args=[number], keywords=[]):
            inner = other(number, chance)
            return None if inner is None else ast.Call(value.func, [inner], [])
    return None


def _one_other(parts: Sequence[ast.expr], chance: Random) -> list[ast.expr] | None:
    for place in chance.sample(range(len(parts)), len(parts)):
        if not isinstance(parts[place], ast.Starred) and (new := other(parts[place], chance)) is not None:
            return [*parts[:place], new, *parts[place + 1 :]]
    return None


def _another(value: _Literal, chance: Random) -> _Literal:
    """Of the same kind, and far enough away for whoever compares approximately."""
    match value:
        case bool():
            return not value
        case int():
            step = abs(value) // 4 + chance.choice((1, 2, 3))
            return value + step if abs(value) < 4 or chance.random() < 0.5 else value - step
        case float():
            if not math.isfinite(value):
                return 0.5
            digits = len(repr(value).partition(".")[2])
            if abs(value) < 1:  # and stays so
                new = math.copysign(abs(value) + (0.5 if abs(value) < 0.5 else -0.5), value)
                return round(new, digits) if 0 < digits < 12 and "e" not in repr(value) else new
            new = value * 1.25 + math.copysign(1, value)
            return (round(new, digits) if digits < 12 else new) if math.isfinite(new) else value / 2
        case complex():
            return value + 1 if value + 1 != value else 1j
        case str():
            return _text(value, chance)
        case bytes():
            return _text(value.decode("latin-1"), chance).encode("latin-1")
    return 0  # None or an ellipsis


def _text(text: str, chance: Random) -> str:
    """With another character somewhere, of the same kind; letters differ in more than their case."""
    if not text:
        return chance.choice(string.ascii_lowercase)
    place = chance.randrange(len(text))
    alphabet = next((letters for letters in _ALPHABETS if text[place] in letters), _PUNCTUATION)
    return text[:place] + chance.choice(alphabet.replace(text[place], "")) + text[place + 1 :]
