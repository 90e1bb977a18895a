"""Each pinned harness solves a task in a sandbox that has no network but the proxy: what `rl harness verify` proves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.cli import main
from sandbox.environments.namespace.preflight import problems
from sandbox.harnesses import lookups
from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.verify import verify
from sandbox.redteam.ordinary import as_ordinary_user
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

TURNS = {"opencode": 6, "terminus-2": 6}
"""Model calls of list, read, edit, run, finish: OpenCode asks for a title too, Terminus 2 confirms its end."""


@pytest.mark.parametrize("name", HANDS)
def test_the_pinned_harness_solves_a_task_offline(name: str) -> None:
    result = CliRunner().invoke(main, ["harness", "verify", name, "--runtimes", str(store(name).root), "--json"])
    row = json.loads(result.stdout)
    assert (row["reward"], row["violations"], row["foreign_hosts"], row["problem"]) == (1, [], [], "")
    assert (row["harness"], row["turns"], result.exit_code) == (name, TURNS.get(name, 5), 0)


ALONE = """
mount --bind "$1" /etc/resolv.conf && ip link set lo up || exit 99
"$2" -I -S "$3" 3 3</proc/self/ns/net >"$4" &
until test -s "$4"; do sleep 0.1; done
getent hosts probe.example.org
"$2" -P -m sandbox.cli harness verify terminus-2 --json --runtimes "$5"; code=$?
kill $!
exit $code
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a network of its own takes root, and `ip`")
def test_what_runs_in_the_runners_own_process_looks_up_nothing_either(tmp_path: Path) -> None:
    """Terminus 2 has its model client there, which knows price lists and tokenizers on the network."""
    empty, names = tmp_path / "resolv.conf", tmp_path / "names"
    empty.touch()
    responder, runtimes = lookups.__file__.replace("lookups", "lookups_program"), store("terminus-2").root
    arguments = ("sh", empty, sys.executable, responder, names, runtimes)
    ran = subprocess.run(["unshare", "--mount", "--net", "sh", "-c", ALONE, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert json.loads(ran.stdout)["reward"] == 1
    assert set(names.read_text().splitlines()) == {"ready", "probe.example.org"}


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", ["codex", "opencode", "terminus-2"])
def test_it_does_so_where_an_ordinary_user_runs_the_runner(name: str) -> None:
    """Without root: user namespaces, and limits per process."""
    if found := problems("rootless"):
        pytest.skip("; ".join(found))
    runtimes = store(name)

    def proven() -> None:
        result = asyncio.run(verify(pinned(name), runtimes))
        assert result.good, result

    as_ordinary_user(proven, (runtimes.root,))
