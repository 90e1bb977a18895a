"""Checks a tree with hidden pytest tests. Runs in the grading sandbox behind a line `PLAN = {...}`; only the standard library is there.

The graded code is imported by the pytest process, so whatever that process says may be a lie. It never holds the verdict channel, and
its report is believed only when it is complete, names every test once, and tells the truth about two tests of its own (`sentinels`), one
that must pass and one that must fail. The twins of `hidden.py`, in which some tests must fail, are judged by the same rules.

Exit status: 0 as expected, 1 not, 98 when pytest was killed, 99 when the report cannot be true.
"""

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
        if report.when == "call" or report.outcome != "passed":
            os.write(9, (report.outcome + " " + report.nodeid + "\\n").encode())
    def pytest_collectreport(self, report):
        if report.failed:
            os.write(9, b"failed " + report.nodeid.encode() + b"::\\n")
os._exit(pytest.main(arguments, plugins=[Report()]))
"""
MAX_REPORT = 1 << 20


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
        outcome, _, node = line.partition(" ")
        file, _, test = node.removeprefix(plan["directory"] + "/").partition("::")
        key = f"{file}::{test.partition('[')[0]}"
        if "[" not in test and key in outcomes and outcomes[key] != {outcome}:
            return 99, f"pytest reported {key} twice, differently"
        outcomes.setdefault(key, set()).add(outcome)
    for name, expected in plan["sentinels"].items():
        if (found := outcomes.pop(name, set())) != {expected}:
            return 99, f"a test that must be {expected} was {' and '.join(sorted(found)) or 'not'} reported (pytest ended with {status})"
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 1:
        return 99, f"pytest ended with {status} although one test must fail"
    for name, expected in plan["tests"].items():
        found = outcomes.get(name, set())
        if found != {expected}:
            words = f"{name} was {' and '.join(sorted(found)) or 'not'} reported"
            return (99, f"{words} although it cannot but fail") if expected == "failed" else (1, words)
    others = sorted(name for name, found in outcomes.items() if found != {"passed"})
    if "failed" not in plan["tests"].values() and others:
        return 1, f"{others[0]} did not pass"
    return None


if __name__ == "__main__":
    sys.exit(main(globals()["PLAN"]))
