"""Task family `onebug`: a file with two functions, one of them wrong in one place, and an issue that names it.

Procedural and deterministic by seed. A task is held out when its (file, function) pair is: no such pair occurs in training. The repair is
real: the agent's commands run in a shell, and a hidden plain-Python check calls the repaired function on values it never saw.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_FILES = """geometry cart billing utils stats grid clock matrix parser stock wallet loan score timer meter budget planner shape vector fuel
graph ledger pixel cache robot sensor orders seats garden tracks"""
_FUNCTIONS = """area price fee gap span rate load cost level speed depth weight bonus quota margin shift blend merge offer adjust settle
reduce convert resolve balance estimate measure compare project combine render compose derive extract inspect process evaluate"""
FILES, FUNCTIONS = _FILES.split(), _FUNCTIONS.split()
_NUMBERS = "left right base step count unit size low high first last width height start stop top bottom inner outer"
_SCALARS = "value number amount ratio reading sample result"
_LISTS = "items values rows nums data marks points"


class Value(NamedTuple):
    """One thing a function may do: the token in its source, what it does in words, and in Python."""

    token: str
    words: str
    run: Callable[..., Any]


class Kind(NamedTuple):
    """A sub-family: `template` is the returned expression, with `{0}`, `{1}` for arguments and `{op}` for the token that may be wrong."""

    template: str
    arguments: list[str]
    arity: int
    values: tuple[Value, ...]
    sample: Callable[[random.Random], list[Any]]


def _pair(rng: random.Random) -> list[Any]:
    low = rng.randint(2, 9)
    return rng.choice([[low, low + rng.randint(1, 9)], [low + rng.randint(1, 9), low]])


def _scalar(rng: random.Random) -> list[Any]:
    return [-rng.randint(2, 90) - rng.choice((0.6, 0.7, 0.8))]


def _list(rng: random.Random) -> list[Any]:
    return [[rng.randint(20, 99), *(rng.randint(10, 99) for _ in range(rng.randint(2, 4))), rng.randint(1, 9)]]


KINDS: dict[str, Kind] = {
    "arith": Kind(
        "{0} {op} {1}",
        _NUMBERS.split(),
        2,
        (
            Value("+", "the sum of {0} and {1}", operator.add),
            Value("-", "{0} minus {1}", operator.sub),
            Value("*", "the product of {0} and {1}", operator.mul),
            Value("//", "the quotient of {0} and {1}", operator.floordiv),
            Value("%", "the remainder of {0} by {1}", operator.mod),
        ),
        _pair,
    ),
    "pick": Kind(
        "{op}({0}, {1})",
        _NUMBERS.split(),
        2,
        (
            Value("min", "the smaller of {0} and {1}", min),
            Value("max", "the larger of {0} and {1}", max),
            Value("pow", "{0} to the power {1}", pow),
            Value("divmod", "both quotient and remainder of {0} by {1}", divmod),
        ),
        _pair,
    ),
    "cast": Kind(
        "{op}({0})",
        _SCALARS.split(),
        1,
        (
            Value("int", "the integer part of {0}", int),
            Value("round", "the nearest integer to {0}", round),
            Value("abs", "the absolute value of {0}", abs),
            Value("str", "{0} as text", str),
            Value("bool", "whether {0} is not zero", bool),
        ),
        _scalar,
    ),
    "fold": Kind(
        "{op}({0})",
        _LISTS.split(),
        1,
        (
            Value("sum", "the total of {0}", sum),
            Value("len", "the number of entries of {0}", len),
            Value("min", "the smallest entry of {0}", min),
            Value("max", "the largest entry of {0}", max),
            Value("sorted", "the entries of {0} in order", sorted),
        ),
        _list,
    ),
}

# The function runs in another interpreter that is told the inputs only; the expected values never enter its memory, and are compared as
# text outside it. So neither prints, nor an early exit, nor a look around in the graded file's process can pass for a result.
_CHECK = '''\
"""Hidden check. Usage: check.py [WORKSPACE]. Exit status 0 means solved, 98 that the solution was killed before it answered."""
import os, sys

FILE, FUNCTION = {file!r}, {function!r}
CASES = {cases!r}
CALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 11))
path, function, inputs = sys.argv[1:]
space = {{"__name__": "graded"}}
with open(path, encoding="utf-8") as source:
    exec(compile(source.read(), path, "exec"), space)
sys.stdout.write(repr([space[function](*case) for case in eval(inputs)]))
"""

path = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "/workspace", FILE)
reader, writer = os.pipe()
command = [sys.executable, "-I", "-S", "-B", "-c", CALL, path, FUNCTION, repr([inputs for inputs, _ in CASES])]
actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
pid = os.posix_spawn(sys.executable, command, {{}}, file_actions=actions)
os.close(writer)
with os.fdopen(reader, "rb") as pipe:
    answer = pipe.read(100_000)
status = os.waitpid(pid, 0)[1]
if os.waitstatus_to_exitcode(status) == -9:
    sys.exit(98)
sys.exit(0 if answer == repr([expected for _, expected in CASES]).encode() else 1)
'''

_TASK_TOML = """\
schema_version = "1.4"
artifacts = ["/workspace"]

[metadata]
family = "onebug"
kind = "{kind}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0
environment_mode = "separate"

[environment]
workdir = "/workspace"
network_mode = "no-network"
"""

_TEST_SH = """\
#!/bin/bash
if python3 -I /tests/check.py /workspace; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True)
class OneBug:
    """One task. `source` is the broken file and `fixed` the repaired one; they differ in one token of what `function` returns.

    What only demonstrations need: the right `expression`, `wrong_expressions` (neither right nor in the file), and the other function.
    """

    name: str
    kind: str
    issue: str
    file: str
    source: str
    fixed: str
    check: str
    function: str
    expression: str
    wrong_expressions: tuple[str, ...]
    other_function: str

    @property
    def repair(self) -> str:
        """The shell command that repairs the file."""
        return f"sed -i '/def {self.function}/,+1s|return .*|return {self.expression}|' {self.file}"

    def write(self, directory: Path) -> None:
        """Write the task as a Harbor task directory. The directory must not hold another task."""
        files = {
            "task.toml": _TASK_TOML.format(kind=self.kind),
            "instruction.md": self.issue,
            "environment/Dockerfile": "FROM python:3.12-slim\nCOPY workspace /workspace\nWORKDIR /workspace\n",
            f"environment/workspace/{self.file}": self.source,
            "tests/check.py": self.check,
            "tests/test.sh": _TEST_SH,
            "solution/solve.sh": f"#!/bin/bash\nset -e\ncd /workspace\n{self.repair}\n",
        }
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)


def held_out_pair(file: str, function: str) -> bool:
    """Whether the pair belongs to the held-out split: one in five, by hash, whatever the seed."""
    return int(hashlib.sha1(f"{file}/{function}".encode(), usedforsecurity=False).hexdigest(), 16) % 5 == 0


def generate(seed: int, n: int, held_out: bool) -> list[OneBug]:
    """`n` distinct tasks of one split; the same arguments give the same tasks, and a longer list starts with the shorter one."""
    rng = random.Random(f"onebug {seed} {held_out}")  # noqa: S311
    tasks: dict[str, OneBug] = {}
    while len(tasks) < n:
        task = _draw(rng, held_out)
        tasks.setdefault(task.name, task)
    return list(tasks.values())


def _draw(rng: random.Random, held_out: bool) -> OneBug:
    while True:
        file, function = f"{rng.choice(FILES)}.py", rng.choice(FUNCTIONS)
        if held_out_pair(file, function) == held_out:
            break
    kind_name = rng.choice(list(KINDS))
    kind = KINDS[kind_name]
    arguments = rng.sample(kind.arguments, kind.arity)
    good, bad = rng.sample(kind.values, 2)
    cases = [(inputs, good.run(*inputs)) for inputs in (kind.sample(rng) for _ in range(4))]

    other_function = rng.choice([name for name in FUNCTIONS if name != function])
    other_kind = KINDS[rng.choice(list(KINDS))]
    other_arguments = rng.sample([name for name in other_kind.arguments if name not in arguments], other_kind.arity)
    other = rng.choice(other_kind.values)

    neighbour = _function(other_function, other_kind, other_arguments, other)
    first = rng.random() < 0.5

    def file_with(value: Value) -> str:
        target = _function(function, kind, arguments, value)
        return "\n\n".join([target, neighbour] if first else [neighbour, target])

    source = file_with(bad)
    issue = f"`{function}` in {file} should return {good.words.format(*arguments)}, but it does not."
    digest = hashlib.sha1(f"{source}\0{issue}".encode(), usedforsecurity=False).hexdigest()[:10]
    return OneBug(
        name=f"onebug-{kind_name}-{file[:-3]}-{function}-{digest}",
        kind=kind_name,
        issue=issue,
        file=file,
        source=source,
        fixed=file_with(good),
        check=_CHECK.format(file=file, function=function, cases=cases),
        function=function,
        expression=_expression(kind, arguments, good),
        wrong_expressions=tuple(_expression(kind, arguments, value) for value in kind.values if value not in (good, bad)),
        other_function=other_function,
    )


def _expression(kind: Kind, arguments: list[str], value: Value) -> str:
    return kind.template.format(*arguments, op=value.token)


def _function(name: str, kind: Kind, arguments: list[str], value: Value) -> str:
    return f"def {name}({', '.join(arguments)}):\n    return {_expression(kind, arguments, value)}\n"
