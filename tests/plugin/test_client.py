import subprocess
from pathlib import Path

import pytest

from plugin.client import Client
from plugin.errors import ControlError, ServerAbsent
from plugin.local import running
from plugin.spec import spec_request
from server.schemas.datadir import DataDir, ServerFile

HERE = Path.cwd()


def test_a_plan_is_found_again_by_its_digest(client: Client) -> None:
    plan = client.plan(spec_request("local", {"trainer.steps": 3}, HERE))
    assert plan.provenance["trainer.steps"] == "override"
    assert client.planned(plan.digest).summary == plan.summary


def test_a_wrong_spec_is_answered_with_what_was_meant(client: Client) -> None:
    with pytest.raises(ControlError, match=r"trainer\.stepz.*did you mean `steps`"):
        client.plan(spec_request("local", {"trainer.stepz": 3}, HERE))


def test_an_unknown_preset_is_answered_with_the_known_ones(client: Client) -> None:
    with pytest.raises(ControlError, match="did you mean `local`"):
        client.plan(spec_request("lcoal", {}, HERE))


def test_an_unknown_run_is_named(client: Client) -> None:
    with pytest.raises(ControlError, match="no run nosuch"):
        client.run("nosuch")


@pytest.mark.parametrize("name", ["", "../token", "a/b", ".hidden", "a b"])
def test_an_id_never_changes_the_path(client: Client, name: str) -> None:
    with pytest.raises(ControlError, match="is not an id"):
        client.run(name)


def test_a_wrong_token_is_refused_in_one_line(client: Client, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong\n")
    stranger = Client.of(DataDir(tmp_path), url=client.url)
    with pytest.raises(ControlError, match="refused the token"):
        stranger.plan(spec_request("local", {}, HERE))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", "tokén".encode(), b"two\nlines"])
def test_a_file_that_is_no_token_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ControlError, match="holds no token"):
        Client.of(DataDir(tmp_path), url="http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["127.0.0.1:8420", "http://[::", "ftp://here"])
def test_what_is_no_address_is_refused_in_one_line(data: DataDir, client: Client, url: str) -> None:
    with pytest.raises(ControlError, match="is no address of a server"):
        Client.of(data, url=url).runs()


def test_the_port_of_a_killed_server_is_not_trusted(client: Client, empty: DataDir) -> None:
    """Whoever listens there now is not sent the token."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    empty.root.mkdir()
    empty.token.write_text("t\n")
    empty.server_file.write_text(ServerFile(url=client.url, pid=gone.pid, create_time=0).model_dump_json())
    with pytest.raises(ServerAbsent, match="run `rl up`"):
        Client.of(empty)


def test_no_server_says_how_to_start_one(empty: DataDir) -> None:
    with pytest.raises(ServerAbsent, match="run `rl up`"):
        Client.of(empty)


def test_a_server_that_died_is_absent(empty: DataDir) -> None:
    empty.root.mkdir()
    empty.token.write_text("t\n")
    empty.server_file.write_text(ServerFile(url="http://127.0.0.1:9", pid=1, create_time=0).model_dump_json())
    with pytest.raises(ServerAbsent, match="run `rl up`"):
        Client.of(empty).runs()
    assert running(empty) is None
