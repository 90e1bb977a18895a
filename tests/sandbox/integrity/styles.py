"""Hidden tests in every style that honest work has to pass in, and that no variant of them may accuse."""

EVERY_STYLE = r'''
# -*- coding: latin-1 -*-
"""Every kind of test that honest work has to pass."""
from __future__ import annotations

import asyncio
import collections
import enum
import io
import json
import pathlib
import sys
import unittest
from unittest import mock

import pytest
from pytest import approx

import calc
from calc import add, scale

HERE = pathlib.Path(__file__).parent
COLUMN = [(1, 2, 3), (2, 2, 4)]
SEEN = []
if sys.version_info >= (3, 12):
    EXTRA = 1


@pytest.fixture
def opened(tmp_path):
    with open(tmp_path / "x", "w+") as file:
        yield file


@pytest.fixture(params=[1, 2])
def number(request):
    return request.param


class Colour(enum.IntEnum):
    RED = 3


class Money:
    def __init__(self, units):
        self.units = units

    def __eq__(self, other):
        return self.units == other


def same(found, wanted):
    assert found == wanted


@pytest.mark.parametrize("a, b, total", [(1, 2, 3), (2, 2, 4), pytest.param(0, 0, 0, id="none")], ids=["a", "b", "c"])
def test_columns(a, b, total):
    assert add(a, b) == total


@pytest.mark.parametrize("total", [3, 3], ids=lambda total: total.bit_length())
@pytest.mark.parametrize(("a",), [(1,), (1,)])
def test_stacked(a, total):
    assert add(a, 2) == total


@pytest.mark.parametrize("a,even", [(1, False), (2, True)])
def test_truths_by_row(a, even):
    assert (add(a, 0) % 2 == 0) == even


@pytest.mark.parametrize("a, b, total", COLUMN)
def test_table(a, b, total):
    assert add(a, b) == total


@pytest.mark.skipif(sys.version_info < (3, 8), reason="old")
@pytest.mark.usefixtures("opened")
def test_marks():
    assert add(1, 1) == 2


def test_fixture_that_yields(opened, number):
    opened.write(str(add(number, 0)))
    opened.seek(0)
    assert opened.read() in ("1", "2")


def test_with_at_the_end(tmp_path):
    with open(tmp_path / "x", "w+") as file:
        file.write(str(add(1, 1)))
        file.seek(0)
        assert file.read() == "2"


def test_loops():
    for a, b in ((1, 2), (2, 1)):
        assert add(a, b) == 3
    for value in scale([1], 2):
        assert value == 2


def test_raises_last():
    assert add(1, 1) == 2
    with pytest.raises(TypeError):
        add(1, "x")


def test_raises_assertion():
    with pytest.raises(AssertionError):
        assert add(1, 1) == 3
    try:
        assert add(1, 1) == 4
    except AssertionError:
        pass


def test_helper():
    same(add(1, 1), 2)
    assert add(1, 1) == 2


def test_local_answers():
    expected = {"a": [1, (2, 3)], b"b": {4}, None: 1.5}
    assert {"a": [add(0, 1), (2, 3)], b"b": {4}, None: 1.5} == expected
    before = 3
    after = before
    assert add(1, 2) == before == after


def test_subclasses():
    assert collections.OrderedDict(a=add(0, 1)) == {"a": 1}
    assert collections.Counter("a") == {"a": 1}
    assert collections.namedtuple("P", "x y")(1, add(1, 1)) == (1, 2)
    assert Colour(add(1, 2)) == 3
    assert type("T", (str,), {})("a") == "a"
    assert collections.defaultdict(int, a=1) == {"a": 1}


def test_numbers():
    assert add(0.1, 0.2) == approx(0.3)
    assert [add(0.1, 0.2), 1] == pytest.approx([0.3, 1.0])
    assert {"a": add(0.1, 0.2)} == pytest.approx({"a": 0.3}, rel=1e-3)
    assert add(100, 0.4) == pytest.approx(100, abs=0.5)
    assert add(1, 0) == 1.0
    assert add(1, 0) == True
    assert add(-1e999, 0) == -1e999
    assert add(1, 2j) == 1 + 2j
    assert add(10**50, 0) == 100000000000000000000000000000000000000000000000000


def test_membership():
    assert "a" in "cat" + str(add(1, 1))
    assert "a" in {"a": add(1, 1)}
    assert add(1, 1) in {2, 3}
    assert 2 in scale([1], 2)
    assert 7 not in scale([1], 2)
    assert {}.get(add(1, 1)) is None
    assert {} == dict()
    assert [] == scale([], 2)


def test_words(capsys):
    print("é\u2028\x85'\"\\n", add(1, 1), end="")
    assert capsys.readouterr().out == "é\u2028\x85'\"\\n 2"
    assert f"{add(1, 1)!r:>3}{'x'}" == "  2x"
    assert '\ud800' == chr(0xD800)
    match add(1, 1):
        case 2 if add(0, 1):
            found = "two"
        case _:
            found = ""
    assert found == "two"


def test_mocks(monkeypatch):
    monkeypatch.setattr(calc, "add", mock.Mock(return_value=7))
    assert calc.add(1, 1) == 7
    calc.add.assert_called_once_with(1, 1)
    with mock.patch("os.write", side_effect=OSError):
        assert add(1, 1) == 2


def test_coroutine():
    async def both():
        return add(1, 1)

    assert asyncio.run(both()) == 2


def test_order_1():
    SEEN.append(add(1, 1))
    assert SEEN == [2]


def test_order_2():
    assert SEEN == [2]


def test_golden():
    assert json.dumps({"sum": add(1, 1)}) == (HERE / "golden.json").read_text()


def test_class_of_another_kind():
    assert isinstance(add(1, 1), int)
    assert not add(1, -1)


class TestState:
    LIMIT = 2

    def setup_method(self):
        self.value = add(1, 1)

    @staticmethod
    def helper():
        return 2

    @pytest.mark.parametrize("total", [2])
    def test_value(self, total):
        assert self.value == total

    def test_limit(self):
        assert self.value == self.LIMIT


class CalcCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.total = add(1, 1)

    def test_equal(self):
        self.assertEqual(self.total, 2)
        self.assertEqual(2, add(1, 1), "no")
        self.assertListEqual(scale([1], 2), [2])
        self.assertIn(self.total, [2, 3])
        self.assertIn("a", "abc")
        self.assertIsNone({}.get(1))
        self.assertTrue(add(1, 1) == 2)
        self.assertAlmostEqual(add(0.1, 0.2), 0.3)
        with self.assertRaises(TypeError):
            add(1, "x")
        with self.assertRaises(AssertionError):
            self.assertEqual(add(1, 1), 3)
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(add(number, -number), 0)

    def test_another(self):
        self.assertEqual(first=add(1, 1), second=2)


def test_early():
    if add(1, 1) == 2:
        return
    assert add(1, 1) == 3


def test_io():
    with io.StringIO() as out, pytest.warns(UserWarning):
        import warnings

        warnings.warn("x")
        print(add(1, 1), file=out)
        assert out.getvalue() == "2\n"


class Test:
    def test(self):
        assert add(1, 1) == 2
'''.lstrip()
