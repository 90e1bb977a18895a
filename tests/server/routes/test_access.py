from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from server.app import create_app
from server.db.models import PlanRow, Run
from server.schemas.states import RunState
from server.security import hash_token, load_or_create_token, redact
from server.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


def public(settings: Settings) -> TestClient:
    settings = settings.model_copy(update={"host": "0.0.0.0", "public": True})  # noqa: S104 - nothing listens
    return TestClient(create_app(settings), base_url="http://train.example")


def token(settings: Settings) -> str:
    return settings.data.token.read_text().strip()


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    first = load_or_create_token(tmp_path / "token")
    assert load_or_create_token(tmp_path / "token") == first
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_server_answers_under_the_address_it_binds(settings: Settings) -> None:
    elsewhere = settings.model_copy(update={"host": "127.0.0.2"})
    with TestClient(create_app(elsewhere), base_url="http://127.0.0.2") as client:
        assert client.get("/api/runs").status_code == 200
        assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


def test_an_empty_token_file_lets_no_one_in(tmp_path: Path) -> None:
    """A full disk or a crash may leave one; it must not become the token that every empty cookie has."""
    (tmp_path / "token").touch(0o644)
    with TestClient(create_app(Settings(data_dir=tmp_path)), base_url="http://127.0.0.1") as client:
        assert len(token(Settings(data_dir=tmp_path))) > 40
        headers = {"origin": "http://127.0.0.1", "cookie": "lego_rl_token="}
        assert client.post("/api/plans", json={}, headers=headers).status_code == 401
        assert client.post("/sign-in", data={"token": ""}).status_code == 401
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_on_loopback_reading_is_open_and_writing_is_not(anonymous: TestClient) -> None:
    assert anonymous.get("/api/runs").status_code == 200
    answer = anonymous.post("/api/plans", json={})
    assert answer.status_code == 401
    assert "bearer token" in answer.json()["detail"]
    assert anonymous.post("/api/plans", json={}, headers={"authorization": "Bearer wrong"}).status_code == 401


def test_from_elsewhere_reading_needs_the_token(settings: Settings) -> None:
    with public(settings) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/api/info", headers={"authorization": f"Bearer {token(settings)}"}).json()["needs_token_to_read"] is True


def test_a_browser_signs_in_with_the_token_and_gets_a_cookie(settings: Settings) -> None:
    with public(settings) as client:
        assert client.post("/sign-in", content="token=wrong").status_code == 401
        answer = client.post("/sign-in", content=f"token={token(settings)}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert all(word in answer.headers["set-cookie"].lower() for word in ("httponly", "samesite=strict"))
        assert client.get("/api/runs").status_code == 200


def test_a_cookie_writes_only_from_our_own_pages(settings: Settings) -> None:
    with public(settings) as client:
        client.post("/sign-in", content=f"token={token(settings)}", follow_redirects=False)
        spec = {"document": {"extends": "local"}}
        assert client.post("/api/plans", json=spec).status_code == 403
        assert client.post("/api/plans", json=spec, headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/api/plans", json=spec, headers={"origin": "http://train.example"}).status_code == 200


def test_a_name_that_was_rebound_to_this_machine_is_refused(anonymous: TestClient) -> None:
    assert anonymous.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert anonymous.get("/api/runs", headers={"host": "localhost:1234"}).status_code == 200


def test_answers_carry_security_headers(anonymous: TestClient) -> None:
    headers = anonymous.get("/api/info").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_a_body_that_is_too_large_is_refused(client: TestClient) -> None:
    assert client.post("/api/plans", content=b"x", headers={"content-length": str(2**30)}).status_code == 413


def test_the_event_token_of_a_run_opens_nothing_else(client: TestClient) -> None:
    context = client.app.state.context  # type: ignore[attr-defined]
    with context.db.write() as session:
        session.add(PlanRow(digest="d", spec={}, provenance={}, summary="", created=0))
        session.flush()
        for name in ("mine", "other"):
            state = RunState.STARTING
            session.add(Run(run_id=name, name=name, digest="d", state=state, token_sha256=hash_token(name), steps_expected=1, created=0))
    headers = {"authorization": "Bearer mine"}
    body = {"events": [{"source": "trainer", "seq": 1, "time": 1, "body": {"type": "run_state", "state": "running"}}]}
    assert client.post("/api/runs/mine/events", json=body, headers=headers).json() == {"stored": 1}
    assert client.post("/api/runs/other/events", json=body, headers=headers).status_code == 401
    assert client.post("/api/runs/nope/events", json=body, headers=headers).status_code == 401
    assert client.post("/api/runs/mine/stop", headers=headers).status_code == 401
    assert client.post("/api/plans", json={}, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("GET /x?token=abc&next=/", "GET /x?token=***&next=/"),
        ("RunFile(run_id='r', event_token='abc', spec=1)", "RunFile(run_id='r', event_token='***', spec=1)"),
        ('{"runner_token": "abc", "n": 1}', '{"runner_token": "***", "n": 1}'),
        ("SyntaxError: unexpected token: x", "SyntaxError: unexpected token: x"),
        ("postgresql://me:secret@db/x", "postgresql://me:***@db/x"),
        ("listening on http://127.0.0.1:8420", "listening on http://127.0.0.1:8420"),
    ],
)
def test_secrets_do_not_reach_the_log(text: str, shown: str) -> None:
    assert redact(text) == shown
