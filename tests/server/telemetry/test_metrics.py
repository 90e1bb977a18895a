from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from server.settings import Settings
from tests.server.routes.test_runs import group, outcome, queued

Labels = dict[str, str]


def scraped(client: TestClient) -> dict[str, list[tuple[Labels, float]]]:
    """Sample name → (labels, value), read by Prometheus's own parser."""
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: dict[str, list[tuple[Labels, float]]], name: str, **labels: str) -> float:
    (found,) = [value for has, value in samples[name] if labels.items() <= has.items()]
    return found


def test_a_scrape_says_where_a_run_stands(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    bodies: list[dict[str, Any]] = [group(1, size=3), *(queued(f"t{n}", "train1", n) for n in range(3))]
    bodies += [outcome("t0", 1), outcome("t1", 0), outcome("t2", None)]
    bodies.append({"type": "stage_timing", "trial_id": "t0", "stage": "agent", "started": 10.0, "finished": 12.5})
    bodies.append({"type": "step", "step": 1, "metrics": {"lego/reward/mean": 0.5}})
    bodies.append({"type": "evaluation", "step": 1, "resolved": 3, "executed": 4, "total": 6, "metrics": {}})
    report(run_id, bodies)
    samples = scraped(client)
    assert value(samples, "lego_rl_runs", state="created") == 1 and value(samples, "lego_rl_runs", state="failed") == 0
    assert value(samples, "lego_rl_run_steps", run=run_id, which="done") == 1
    assert value(samples, "lego_rl_run_steps", run=run_id, which="expected") == 2
    assert value(samples, "lego_rl_trials_total", kind="scored", outcome="completed") == 2
    assert value(samples, "lego_rl_trials_total", kind="failed", outcome="sandbox_setup") == 1
    assert value(samples, "lego_rl_held_out_solve_rate", over="all") == 0.5
    assert value(samples, "lego_rl_held_out_solve_rate", over="executed") == 0.75
    assert value(samples, "lego_rl_trial_stage_seconds_sum", stage="agent") == 2.5
    assert value(samples, "lego_rl_step_metric", metric="lego/reward/mean") == 0.5
    assert value(samples, "lego_rl_run_silence_seconds", run=run_id) >= 0


def test_a_run_that_has_ended_is_only_counted(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    report(run_id, [{"type": "step", "step": 1, "metrics": {"a": 1.0}}])
    assert client.post(f"/api/runs/{run_id}/stop").status_code == 200
    samples = scraped(client)
    assert value(samples, "lego_rl_runs", state="stopped") == 1
    assert "lego_rl_step_metric" not in samples and "lego_rl_run_steps" not in samples


def test_requests_are_labelled_by_route_and_never_by_what_a_client_wrote(client: TestClient) -> None:
    for path in ("/api/runs/nobody", "/api/runs/else", "/no/such/page"):
        assert client.get(path).status_code == 404
    samples = scraped(client)
    assert value(samples, "lego_rl_http_request_seconds_count", route="/api/runs/{run_id}", status="404") == 2
    assert value(samples, "lego_rl_http_request_seconds_count", route="none", status="404") == 1
    assert not any("nobody" in str(labels) for labels, _ in samples["lego_rl_http_request_seconds_count"])


def test_other_machines_need_the_token_to_scrape(settings: Settings) -> None:
    from server.app import create_app

    public = settings.model_copy(update={"host": "10.0.0.5", "public": True})
    with TestClient(create_app(public), base_url="http://10.0.0.5") as stranger:
        assert stranger.get("/metrics").status_code == 401
