"""A server may die at any moment: runs go on without it, and the next one has lost and doubled nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.schemas.states import RunState

from ..waiting import until
from .conftest import Server

pytestmark = pytest.mark.slow


def stored(server: Server, run_id: str) -> list[tuple[str, int]]:
    events = server.http.get(f"/api/runs/{run_id}/events", params={"limit": 1000}).json()
    return [(event["source"], event["seq"]) for event in events]


def go(server: Server, run_id: str) -> None:
    (server.dir(run_id).root / "go").touch()


def test_a_server_killed_in_mid_run_finds_the_run_again(own_server: Server) -> None:
    run_id = own_server.start_run("held")
    until(lambda: own_server.status(run_id).state is RunState.RUNNING)
    own_server.kill()
    go(own_server, run_id)
    spool = own_server.dir(run_id).spool / "trainer.jsonl"
    until(lambda: spool.read_text().count('"type":"step"') == 3)
    own_server.up()
    status = own_server.end_of(run_id)
    assert (status.state, status.steps_done, status.trials) == (RunState.SUCCEEDED, 3, 6)
    assert stored(own_server, run_id) == [("trainer", n + 1) for n in range(spool.read_text().count("\n"))]


def test_a_run_that_ended_while_the_server_was_away_is_concluded(own_server: Server) -> None:
    run_id = own_server.start_run("held")
    until(lambda: own_server.status(run_id).held_out)
    own_server.kill()
    go(own_server, run_id)
    until(own_server.dir(run_id).exit_file.exists)
    own_server.up()
    status = own_server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.SUCCEEDED, 3)


def test_a_server_on_another_port_reads_what_cannot_reach_it(own_server: Server) -> None:
    run_id = own_server.start_run("held")
    until(lambda: own_server.status(run_id).held_out)
    own_server.down()
    own_server.up()
    assert str(own_server.http.base_url).rstrip("/") != own_server.dir(run_id).load().server_url
    go(own_server, run_id)
    status = own_server.end_of(run_id)
    assert (status.state, status.steps_done, status.trials) == (RunState.SUCCEEDED, 3, 6)


def test_a_server_leaves_the_runs_of_another_data_directory_alone(own_server: Server, tmp_path: Path) -> None:
    run_id = own_server.start_run("held")
    until(lambda: own_server.status(run_id).held_out)
    shared = own_server.http.get("/api/info").json()["database"]
    neighbour = Server(tmp_path / "neighbour", shared)
    neighbour.up()
    go(own_server, run_id)
    assert own_server.end_of(run_id).state is RunState.SUCCEEDED
    assert neighbour.status(run_id).state is RunState.SUCCEEDED
    neighbour.down()


def test_processes_of_other_people_are_never_signalled(own_server: Server) -> None:
    """A ledger line whose pid now belongs to someone else: the start time differs."""
    run_id = own_server.start_run("held")
    until(lambda: own_server.processes(run_id, "trainer"))
    ledger = own_server.dir(run_id).processes_file
    mine = own_server.process
    assert mine is not None
    line = ledger.read_text().splitlines()[-1]
    (trainer,) = own_server.processes(run_id, "trainer")
    ledger.write_text(ledger.read_text() + line.replace(f'"pid":{trainer.pid}', f'"pid":{mine.pid}') + "\n")
    own_server.http.post(f"/api/runs/{run_id}/stop")
    assert own_server.end_of(run_id).state is RunState.STOPPED
    assert mine.poll() is None


def test_a_broken_ledger_keeps_no_server_from_starting(own_server: Server) -> None:
    """A full disk cut a line of it; the processes on the other lines are still ours."""
    run_id = own_server.start_run("held")
    until(lambda: own_server.processes(run_id, "trainer"))
    own_server.kill()
    with own_server.dir(run_id).processes_file.open("a") as ledger:
        ledger.write('{"boot_id": "x", "pi\xff\n')
    own_server.up()
    own_server.http.post(f"/api/runs/{run_id}/stop")
    assert own_server.end_of(run_id).state is RunState.STOPPED
