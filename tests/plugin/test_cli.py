import json
import subprocess
import sys
from pathlib import Path

import pytest

from plugin.client import Client
from plugin.errors import ControlError
from plugin.rooms import SANDBOX, TRAINER, VERBS, Room, room_command
from server.schemas.datadir import DataDir

RL = Path(sys.executable).parent / "rl"


def rl(data: DataDir, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([RL, "--data-dir", data.root, *args], input=stdin, capture_output=True, text=True, timeout=60)


def test_help_imports_nothing_heavy() -> None:
    """`rl --help` must answer at once, so importing the command line may pull in click and little else."""
    heavy = {"httpx", "pydantic", "yaml", "psutil", "mcp", "fastapi", "sqlalchemy", "torch", "harbor", "verl"}
    code = "import sys; from plugin.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert heavy.isdisjoint(out.split())


def test_without_a_server_the_remedy_is_named(empty: DataDir) -> None:
    result = rl(empty, "status")
    assert result.returncode == 1
    assert result.stderr == f"Error: no server is running on {empty.root}: run `rl up`\n"
    assert not empty.root.exists()


def test_wrong_usage_is_told_apart(empty: DataDir) -> None:
    assert rl(empty, "stop").returncode == 2
    assert rl(empty, "review", "f1", "maybe").returncode == 2
    assert rl(empty, "nonsense").returncode == 2


@pytest.mark.parametrize("verb", ["up", "down", "demo"])
def test_a_server_elsewhere_is_not_started_or_stopped(empty: DataDir, verb: str) -> None:
    result = rl(empty, "--url", "http://127.0.0.1:9", verb)
    assert result.returncode == 2
    assert "leave out --url" in result.stderr
    assert not empty.root.exists()


def test_up_status_down(empty: DataDir) -> None:
    up = rl(empty, "up", "--port", "0")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("started: http://127.0.0.1:")
    assert rl(empty, "up").stdout.startswith("already running: ")
    assert rl(empty, "status").stdout == "no runs yet: start one with `rl run`\n"
    assert rl(empty, "down").returncode == 0
    assert rl(empty, "down").returncode == 1


def test_a_plan_is_shown_and_nothing_starts_without_a_yes(client: Client, data: DataDir) -> None:
    result = rl(data, "run", "--set", "trainer.steps=3", stdin="n\n")
    assert result.returncode == 1
    assert "trainer.steps = 3  (override)" in result.stdout
    assert result.stderr == "Error: not started\n"
    assert client.runs() == []


def test_without_anyone_to_ask_nothing_starts(client: Client, data: DataDir) -> None:
    result = rl(data, "run")
    assert (result.returncode, result.stderr) == (1, "Error: not started: nobody answered; --yes starts without asking\n")
    assert client.runs() == []


def test_what_a_run_is_called_does_not_steer_the_terminal(client: Client, data: DataDir) -> None:
    result = rl(data, "run", "--plan", "--set", r'reporting.name="a\e[2Jb"')
    assert "reporting.name = a\ufffd[2Jb  (override)" in result.stdout


def test_a_reader_that_leaves_is_no_error(client: Client, data: DataDir) -> None:
    command = f"{RL} --data-dir {data.root} run --plan | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.stdout.count("\n"), result.stderr) == (1, "")


def test_only_planning_is_fine(client: Client, data: DataDir) -> None:
    result = rl(data, "run", "--plan")
    assert result.returncode == 0
    digest = result.stdout.splitlines()[-1].removeprefix("plan ")
    assert client.planned(digest).summary == result.stdout.splitlines()[0]


def test_a_spec_file_with_an_unknown_key_is_one_line(client: Client, data: DataDir, tmp_path: Path) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text("extends: local\ntrainer: {stepz: 3}\n")
    result = rl(data, "run", str(spec))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "did you mean `steps`" in result.stderr


def test_an_unknown_run_is_one_line(client: Client, data: DataDir) -> None:
    for verb in ("status", "stop", "diagnose", "dashboard"):
        result = rl(data, verb, "nosuch")
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr


def test_the_dashboard_is_the_servers_address(client: Client, data: DataDir) -> None:
    assert rl(data, "dashboard").stdout == f"{client.url}/\n"


def test_a_verb_of_another_room_says_what_installs_it() -> None:
    absent = Room("trainer.cli", "no_such_package", "uv sync --extra trainer")
    with pytest.raises(ControlError, match="`trainer` is not installed here: run `make install`"):
        room_command(absent, [])


def test_a_verb_is_dispatched_to_the_room_that_has_it(empty: DataDir) -> None:
    assert VERBS["bench"].room_of(("trials", "--n", "4")) is SANDBOX
    assert VERBS["bench"].room_of(("engine",)) is TRAINER
    assert VERBS["harness"].room_of(()) is SANDBOX
    assert "talks to no server" in rl(empty, "bench", "engine").stderr
    assert "missing" in rl(empty, "harness", "list").stdout


def test_status_as_json_is_one_object_a_line(client: Client, data: DataDir) -> None:
    lines = rl(data, "status", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [run.model_dump(mode="json") for run in client.runs()]
