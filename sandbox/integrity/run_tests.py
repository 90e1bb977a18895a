"""Checks a tree with hidden pytest tests. Runs in the grading sandbox behind a line `PLAN = {...}`; only the standard library is there.

The graded code is imported by the pytest process, so whatever that process says may be a lie. It never holds the verdict channel, and
its report is believed only when it is complete, names every test once, and tells the truth about two tests of its own (`sentinels`), one
that must pass and one that must fail. The twins of `hidden.py`, in which some tests must fail, are judged by the same rules. Of tests
without their answers (`seal.py`) the report also tells values; whether they are right is decided here.

Exit status: 0 as expected, 1 not, 97 when only values decide that have no plain form, 98 when pytest was killed, 99 when the report cannot
be true.
"""

import ast
import os
import shlex
import sys
from pathlib import Path
from typing import Any

PYTEST = """
import os, sys
where, *arguments = sys.argv[1:]
sys.path.insert(0, where)
import pytest
class Report:
    def pytest_runtest_logreport(self, report):
        part = report.when != "call" or hasattr(report, "context")  # a fixture, or a subtest: it can fail a test that passed
        if report.outcome != "passed" or not part:
            os.write(9, (report.outcome + " " + report.nodeid + "[part]" * part + "\\n").encode())
    def pytest_collectreport(self, report):
        if report.failed:
            os.write(9, b"failed " + report.nodeid.encode() + b"::\\n")
os._exit(pytest.main(arguments, plugins=[Report()]))
"""
MAX_REPORT = 8 << 20
MAX_VALUE = 40_000
"""Bytes of a value as it is told; what is longer is reported as nothing."""


def main(plan: dict[str, Any]) -> int:
    for name, content in plan["files"].items():
        path = Path(plan["directory"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    status, report = run(plan)
    verdict = judge(plan, status, report)
    if verdict:
        sys.stderr.write(f"\n{verdict[1]}\n")
    return verdict[0] if verdict else 0


def run(plan: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit status of pytest, and the lines of its report."""
    names = sorted(f"{plan['directory']}/{name}" for name in plan["run"])
    # A relative `pythonpath` would be taken from the directory of the configuration file. Code that cannot be imported fails its own
    # tests; without the last option it would silence the others, too, and look like a lie.
    arguments = ["-c", "/dev/null", "--rootdir=.", "-o", f"pythonpath={shlex.quote(str(Path.cwd()))}", "-p", "no:cacheprovider"]
    arguments += ["-q", "--color=no", "--tb=line", "--continue-on-collection-errors", *names]
    command = [sys.executable, "-I", "-B", "-c", PYTEST, plan["pytest"], *arguments]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    reader, writer = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writer, 9), (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    pid = os.posix_spawn(sys.executable, command, env, file_actions=actions)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read(MAX_REPORT)
    return os.waitpid(pid, 0)[1], report.decode(errors="replace").splitlines()


def judge(plan: dict[str, Any], status: int, report: list[str]) -> tuple[int, str] | None:
    """None as expected, else (exit status, why)."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9:
        return 98, "pytest was killed"
    outcomes: dict[str, set[str]] = {}
    for line in report:
        if line.startswith("value "):
            continue
        outcome, _, node = line.partition(" ")
        file, _, test = node.removeprefix(plan["directory"] + "/").partition("::")
        key = f"{file}::{test.partition('[')[0]}"
        if "[" not in test and key in outcomes and outcomes[key] != {outcome}:
            return 99, f"pytest reported {key} twice, differently"
        outcomes.setdefault(key, set()).add(outcome)
    for name, expected in plan["sentinels"].items():
        if (found := outcomes.pop(name, set())) != {expected}:
            return 99, f"a test that must be {expected} was {' and '.join(sorted(found)) or 'not reported'} (pytest ended with {status})"
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 1:
        return 99, f"pytest ended with {status} although one test must fail"
    for name, expected in plan["tests"].items():
        found = outcomes.get(name, set())
        if found != {expected}:
            words = f"{name} was {' and '.join(sorted(found)) or 'not reported'}"
            return (99, f"{words} although it cannot but fail") if expected == "failed" else (1, words)
    others = sorted(name for name, found in outcomes.items() if found != {"passed"})
    if "failed" not in plan["tests"].values() and others:
        return 1, f"{others[0]} did not pass"
    return values(plan, report)


def values(plan: dict[str, Any], report: list[str]) -> tuple[int, str] | None:
    """The same for what the report tells of values; all tests passed."""
    told: set[tuple[int, int]] = set()
    without_form = ""
    for line in report:
        match line.split(" ", 4):
            case ["value", index, place, exact, text]:
                number, row = int(index), int(place)
                answer = plan["answers"][number]
                told.add((number, row))
                if meets(answer["is"], ast.literal_eval(answer["what"][row]), text):
                    continue
                if exact == "1":
                    return 1, f"{answer['test']} passed with a value that it cannot pass with"
                without_form = f"{answer['test']} compares an object that has no plain form"
    for number, answer in enumerate(plan["answers"]):
        if answer["must"] and any((number, row) not in told for row in range(len(answer["what"]))):
            return 99, f"{answer['test']} passed without a word of its values"
    return (97, without_form) if without_form else None


def meets(kind: str, wanted: Any, text: str) -> bool:
    try:
        found = ast.literal_eval(text[:MAX_VALUE])
        if kind == "close":
            return close(found, *wanted)
        return bool(found == wanted if kind == "equals" else found in wanted if kind == "among" else wanted in found)
    except (ValueError, TypeError, AttributeError, KeyError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return False


def close(found: Any, wanted: Any, relative: float | None, absolute: float | None) -> bool:
    """As `pytest.approx` compares."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[key], wanted[key], relative, absolute) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(close(*pair, relative, absolute) for pair in zip(found, wanted, strict=True))
    if not isinstance(wanted, int | float | complex) or found == wanted or abs(wanted) == float("inf"):
        return bool(found == wanted)
    least = 1e-12 if absolute is None else absolute
    near = 0.0 if relative is None and absolute is not None else (1e-6 if relative is None else relative) * abs(wanted)
    return bool(abs(found - wanted) <= max(least, near))


if __name__ == "__main__":
    sys.exit(main(globals()["PLAN"]))
