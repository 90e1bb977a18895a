"""The Live UI as a person meets it: in a browser, over a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from server.schemas.datadir import DataDir

from .conftest import ARTIFACTS

pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Browser, server: str) -> Iterator[Page]:
    """What goes wrong on it fails the test at its end: raised in a listener, it would end the connection to the browser instead.

    It is closed while the server lives, whose end is an error for a page that follows a run.
    """
    page, wrong = browser.new_page(base_url=server, viewport={"width": 1240, "height": 1400}), list[str]()
    page.on("pageerror", lambda error: wrong.append(f"script error: {error}"))
    page.on("console", lambda message: wrong.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((server, "data:")) else wrong.append(f"asked for {request.url}"))
    yield page
    page.close()
    assert wrong == []


def shot(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True)


def test_the_list_leads_to_a_run(page: Page) -> None:
    page.goto("/")
    shot(page, "runs")
    expect(page.locator("table")).to_contain_text("5 / 12")
    page.get_by_role("link", name="demo").click()
    expect(page.locator("h1")).to_contain_text("demo")


def test_a_run_shows_curves_and_the_forming_step_and_stays_current(page: Page, append: Callable[[list[dict[str, Any]]], None]) -> None:
    page.goto("/runs/r1")
    expect(page.locator("#forming")).to_contain_text("Step 6: 40/64 trials, 10 failed: sandbox_setup")
    expect(page.locator("body[data-drawn='6']")).to_be_attached()
    assert page.locator("canvas").count() == 3
    expect(page.locator("#metric-key")).to_have_value("training/rollout_actor_probs_pearson_corr")
    shot(page, "run")
    group = {"type": "group", "group_id": "late", "step": 7, "phase": "train", "task": "t", "harness": "mini-swe-agent", "size": 1}
    trial = {"type": "trial", "trial_id": "late-0", "state": "queued", "stage": "queued", "group_id": "late", "sample": 0}
    outcome = {"type": "outcome", "trial_id": "late-0", "outcome": {"kind": "scored", "reward": 1, "termination": "completed"}}
    evaluation = {"type": "evaluation", "step": 6, "resolved": 60, "executed": 95, "total": 96}
    append([group, trial, outcome, {"type": "step", "step": 6, "metrics": {"actor/grad_norm": 0.3}}, evaluation])
    expect(page.locator("body[data-drawn='7']")).to_be_attached()
    expect(page.locator("#live")).to_contain_text("62%")  # 60 of 96, by itself
    page.locator("#metric-key").select_option("actor/grad_norm")
    shot(page, "run-later")


def test_trials_lead_to_their_turns_and_nothing_a_policy_wrote_runs(page: Page) -> None:
    page.goto("/runs/r1")
    page.locator("nav.filters").get_by_text("2", exact=True).click()
    page.get_by_role("link", name="s002-t0-7", exact=True).click()
    expect(page.locator(".problem").first).to_contain_text("no space left <script>")
    expect(page.locator("pre.sampled").first).to_contain_text('bash {"command": "cat cart.py"}')
    expect(page.locator(".turn").first).to_contain_text("ran and failed for 0.25 s")
    expect(page.locator("#harness-log")).to_contain_text("3 lines are no records")
    assert page.title() == "s002-t0-7 · lego-rl"
    assert page.locator("pre img, .problem img, .facts img").count() == 0
    shot(page, "trial")


def test_a_person_signs_in_and_confirms_a_finding(page: Page, data: DataDir) -> None:
    page.goto("/runs/r1")
    finding = page.locator("#findings .turn")
    expect(finding).to_contain_text("Trials fail with sandbox_setup")
    expect(finding).to_contain_text("trial:s002-t0-6")
    page.get_by_role("link", name="sign in").click()
    page.get_by_label("token").fill(data.token.read_text().strip())
    page.get_by_role("button").click()
    page.goto("/runs/r1")
    page.get_by_label("note").fill("the disk was full")
    page.get_by_role("button", name="confirm").click()
    expect(finding.locator(".badge")).to_have_text("confirmed")
    page.reload()
    expect(page.locator("#findings .note")).to_have_text("the disk was full")
    shot(page, "finding")


@pytest.mark.parametrize("path", ["/runs/none", "/runs/none/live", "/runs/none/series.json", "/runs/r1/trials/none", "/runs/..%2F..%2Fetc"])
def test_what_does_not_exist_is_said(browser: Browser, server: str, path: str) -> None:
    answer = browser.new_page().request.get(server + path)
    assert answer.status == 404 and "detail" in answer.json()


def machine(hint: str) -> dict[str, Any]:
    findings = [
        {"check": "mounts", "state": "warn", "message": "2 mounts of sandboxes in the machine's own namespace", "hint": hint},
        {"check": "disk", "state": "ok", "message": "40% used, 300 GB free where runs are kept", "hint": ""},
    ]
    return {"type": "machine", "host": "node-1", "findings": findings, "facts": {"cgroups": 812, "disk used": 0.4}}


def timing(trial: str, stage: str, started: float, seconds: float) -> dict[str, Any]:
    return {"type": "stage_timing", "trial_id": trial, "stage": stage, "started": started, "finished": started + seconds}


def test_machines_regrades_and_hints_are_shown(page: Page, append_more: Callable[[list[dict[str, Any]]], None]) -> None:
    scored = {"kind": "scored", "reward": 1, "termination": "completed"}
    bodies: list[dict[str, Any]] = [machine("unmount them")]
    bodies += [{"type": "trial", "trial_id": "timed", "state": "running", "stage": "sandbox_setup"}]
    bodies += [{"type": "outcome", "trial_id": "timed", "outcome": scored}, timing("timed", "agent", 9002, 0.5)]
    for step in (1, 2, 3):
        bodies += [timing(f"s{step:03}-t0-0", stage, 1000, 0.1 * step) for stage in ("sandbox_setup", "agent", "verifier")]
    bodies += [
        {"type": "regrade", "trial_id": f"s003-t{task}-{sample}", "verifier": "separate", "inputs": "x", "outcome": scored}
        for task in range(8)
        for sample in range(8)
    ]
    append_more(bodies)
    page.goto("/")
    page.get_by_role("link", name="machines").click()
    expect(page.locator(".machine")).to_contain_text("1 to look at")
    expect(page.locator(".machine")).to_contain_text("unmount them")
    expect(page.locator(".machine")).to_contain_text("0.100 s at step 1, 0.300 s at step 3")
    shot(page, "machines")

    page.goto("/runs/r1")
    expect(page.locator("#regraded-legend")).to_be_visible()
    expect(page.locator("#stages")).to_contain_text("0.500")
    shot(page, "regraded")

    page.goto("/runs/r1/trials/s003-t0-0")
    expect(page.locator(".regrade")).to_contain_text("reward 1")
    page.goto("/runs/r1/trials/s002-t0-6")
    expect(page.locator("#hint")).to_contain_text("rl doctor")
    shot(page, "failed-trial")
