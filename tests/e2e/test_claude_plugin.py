"""A run driven only through Claude Code: the real CLI with our plugin, in front of an endpoint that plays the model's part."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from plugin.client import Client
from server.schemas.datadir import DataDir
from server.schemas.states import RunState
from tests.support.claude_cli import claude_cli, claude_env
from tests.support.quick_server import quick_server
from tests.support.scripted_anthropic import Body, Script, call, say, scripted_anthropic, tool_results
from tests.support.whole import real_server

ROOT = Path(__file__).parents[2]
TOOL = "mcp__plugin_rl_control__"
OVERRIDES = {"trainer.steps": 2, "trainer.evaluation.rollouts": 96, "rollout.tasks_per_step": 2, "rollout.group_size": 4}


class Session:
    """One conversation with the CLI over its stream-json protocol, with a person who is asked for permission and for answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.permissions: list[str] = []
        self.questions: list[str] = []

    def say(self, text: str) -> str:
        """Say something (or a slash command) and return what the assistant answered in the end."""
        self._send({"type": "user", "message": {"role": "user", "content": text}})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if message["type"] == "control_request":
                self._answer(message["request_id"], message["request"])
            if message["type"] == "result":
                assert not message["is_error"], message
                return str(message["result"])
        raise AssertionError(f"the CLI ended with {self._process.wait()}")

    def _answer(self, request_id: str, request: dict[str, Any]) -> None:
        if request["subtype"] == "can_use_tool":
            self.permissions.append(request["tool_name"])
            answer: dict[str, Any] = {"behavior": "allow", "updatedInput": request["input"]}
        else:
            assert request["subtype"] == "elicitation", request
            self.questions.append(request["message"])
            answer = {"action": "accept", "content": {"start": True}}
        self._send({"type": "control_response", "response": {"subtype": "success", "request_id": request_id, "response": answer}})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


@contextmanager
def claude(home: Path, base_url: str) -> Iterator[Session]:
    command = [claude_cli(), "--plugin-dir", ROOT, "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
    process = subprocess.Popen(
        [*command, "--permission-prompt-tool", "stdio"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=claude_env(home, base_url),
        cwd=home,
    )
    try:
        yield Session(process)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(30)


def last_result(body: Body) -> dict[str, Any]:
    """The structured answer of the tool that the model called last."""
    result = tool_results(body)[-1]
    assert not result.get("is_error"), result
    answer: dict[str, Any] = json.loads(result["content"])
    return answer


def repeat(summary: Callable[[dict[str, Any]], str]) -> Callable[[Body], list[dict[str, Any]]]:
    return lambda body: [say(summary(last_result(body)))]


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control_plane", [quick_server, real_server], ids=["quick trainer", "real run"])
def test_check_run_status_dashboard(tmp_path: Path, control_plane: Callable[[DataDir], AbstractContextManager[Client]]) -> None:
    script = Script(
        [
            lambda body: [call(TOOL + "check", spec="local", overrides=OVERRIDES, skip_slow=True)],
            repeat(lambda checked: f"checked: {checked['done']} {checked['summary']}"),
            lambda body: [call(TOOL + "plan_run", spec="local", overrides=OVERRIDES)],
            repeat(lambda plan: f"{plan['summary']} Digest {plan['digest']}. Start it?"),
            lambda body: [call(TOOL + "start_run", digest=last_result(body)["digest"], confirm=True)],
            repeat(lambda started: f"started {started['run_id']} at {started['dashboard']}"),
            lambda body: [call(TOOL + "run_status", wait_s=9)],
            repeat(lambda status: f"{status['run_id']} {status['summary']}"),
            lambda body: [call(TOOL + "dashboard_url", run=tool_results(body)[-1]["content"].split('"run_id":"')[1].split('"')[0])],
            repeat(lambda link: link["url"]),
        ]
    )
    data = DataDir(tmp_path / "data" / "lego-rl")
    data.root.mkdir(parents=True)
    with control_plane(data) as control, scripted_anthropic(script) as url, claude(tmp_path, url) as session:
        assert session.say("/rl:check local trainer.steps=2").startswith("checked: True")
        assert session.permissions == [], "the skill allows the tools that only look"

        shown = session.say("/rl:run local trainer.steps=2")
        digest = re.findall(r"Digest ([0-9a-f]{64})", shown)[0]
        assert "2 steps" in shown
        assert control.runs() == [], "a plan alone starts nothing"

        started = session.say("Yes, start it.")
        assert session.permissions == [TOOL + "start_run"]
        assert session.questions == [f"{control.planned(digest).summary}\nStart this run?"]
        [run] = control.runs()
        assert started == f"started {run.run_id} at {control.url}/runs/{run.run_id}"

        assert session.say("/rl:status").startswith(f"{run.run_id} ")
        assert session.say(f"/rl:dashboard {run.run_id}") == f"{control.url}/runs/{run.run_id}"

        status = control.run(run.run_id, wait_s=8)
        while status.finished is None:
            status = control.run(run.run_id, wait_s=8)
        assert (status.state, status.steps_done, status.failed) == (RunState.SUCCEEDED, 2, 0)
    assert script.turns == []
    assert len(tool_results(script.seen[-1])) == 5
    assert not any(result.get("is_error") for result in tool_results(script.seen[-1]))
