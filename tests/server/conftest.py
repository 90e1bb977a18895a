from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from server.app import create_app
from server.db import Database
from server.db.models import PlanRow, Run
from server.schemas.events import Event
from server.schemas.states import RunState
from server.settings import Settings
from server.spec import resolve

from .postgres import new_database, postgres_server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'lego.db'}"
    return new_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    db = Database(database_url)
    db.migrate()
    yield db
    db.close()


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(data_dir=tmp_path, database_url=database_url)


@pytest.fixture
def anonymous(settings: Settings) -> Iterator[TestClient]:
    """A client without a token."""
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def client(anonymous: TestClient, settings: Settings) -> TestClient:
    anonymous.headers["authorization"] = f"Bearer {settings.data.token.read_text().strip()}"
    return anonymous


@pytest.fixture
def report(client: TestClient) -> Callable[..., int]:
    """`report(run_id, [body, …], source=…, first=…)` sends bodies as consecutive events and returns what the server has stored."""

    def send(run_id: str, bodies: list[dict[str, Any]], source: str = "trainer", first: int = 1) -> int:
        events = [
            Event.model_validate({"source": source, "seq": first + n, "time": 1000.0 + first + n, "body": body})
            for n, body in enumerate(bodies)
        ]
        answer = client.post(f"/api/runs/{run_id}/events", json={"events": [event.model_dump(mode="json") for event in events]})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["stored"])

    return send


@pytest.fixture
def run_id(client: TestClient, settings: Settings) -> str:
    """A run as the launcher leaves it, without processes."""
    resolved = resolve({"extends": "local"}, {"trainer.steps": 2})
    with client.app.state.context.db.write() as session:  # type: ignore[attr-defined]
        plan = PlanRow(digest=resolved.digest, spec=resolved.spec.model_dump(mode="json"), provenance={}, summary="", created=0)
        session.add(plan)
        session.flush()
        # The follower leaves a run alone while it is only created.
        session.add(Run(run_id="r1", name="n", digest=plan.digest, state=RunState.CREATED, token_sha256="", steps_expected=2, created=1))
    (settings.data.runs / "r1" / "captures").mkdir(parents=True)
    return "r1"
