"""The proxy against the real programs: Claude Code and Codex themselves, and LiteLLM, which is mini-swe-agent's client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.schemas.capture import BranchReason
from tests.support.claude_cli import claude_cli, claude_env
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say
from trainer.engine.base import EngineError
from trainer.proxy.limits import Patience

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime


async def claude(rollout: Rollout, home: Path) -> dict[str, Any]:
    """Claude Code's own result object for one headless run."""
    env = {**claude_env(home, rollout.url), "ANTHROPIC_API_KEY": rollout.key, "ANTHROPIC_MODEL": "qwen3-coder", "IS_SANDBOX": "1"}
    process = await asyncio.create_subprocess_exec(
        str(claude_cli()), "-p", "Fix calc.py.", "--output-format", "json", "--dangerously-skip-permissions",
        "--system-prompt", "You fix code.", "--tools", "Bash,Read",
        env=env, cwd=home, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, _ = await process.communicate()
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.claude
async def test_claude_code_is_one_branch(rollout: Rollout, tmp_path: Path) -> None:
    rollout.engine.script = [
        call("Bash", "I list.", command="ls", description="List"),
        calls(("Bash", {"command": "pwd", "description": "d"}), ("Bash", {"command": "echo  hi", "description": "e"})),
        "<think>\nOnly one file.\n</think>\n\n" + call("Bash", command="true", description="d"),
        say("All done."),
    ]
    assert (await claude(rollout, tmp_path))["result"] == "All done."
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert (sample.reason, sample.excluded, capture.policy_turns) == (BranchReason.ROOT, None, 4)


@pytest.mark.claude
@pytest.mark.parametrize("patience", [Patience(keep_alive=0.2)])
async def test_claude_code_takes_empty_deltas_before_the_first_block_for_nothing(rollout: Rollout, tmp_path: Path) -> None:
    rollout.engine.script = [
        call("Bash", command="ls", description="List"),
        "<think>\nOne file.\n</think>\n\n" + call("Bash", "So.", command="pwd", description="d"),
        say("Done."),
    ]
    rollout.engine.gate = asyncio.Event()

    async def now_and_then() -> None:
        assert rollout.engine.gate is not None
        while True:
            await asyncio.sleep(1)
            rollout.engine.gate.set()
            await asyncio.sleep(0)
            rollout.engine.gate.clear()

    slow = asyncio.create_task(now_and_then())
    try:
        assert (await claude(rollout, tmp_path))["result"] == "Done."
    finally:
        slow.cancel()
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert (sample.excluded, capture.policy_turns) == (None, 3)


@pytest.mark.claude
@pytest.mark.parametrize("max_turns", [1])
async def test_claude_code_takes_the_turn_cap_as_its_end(rollout: Rollout, tmp_path: Path) -> None:
    rollout.engine.script = [call("Bash", command="ls", description="List")]
    result = await claude(rollout, tmp_path)
    assert (result["is_error"], result["result"]) == (True, "Prompt is too long")
    capture = await rollout.close()
    assert (capture.turn_cap_hit, capture.policy_turns) == (True, 1)


@pytest.mark.claude
async def test_claude_code_ends_at_once_when_the_engine_is_gone(rollout: Rollout, tmp_path: Path) -> None:
    rollout.engine.script = [EngineError("out of memory")]
    assert (await claude(rollout, tmp_path))["is_error"]
    assert (await rollout.close()).engine_error == "EngineError: out of memory"


def codex(rollout: Rollout, home: Path, **provider: Any) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one headless run. Skips the calling test where the sandbox room is not installed."""
    pytest.importorskip("harbor")
    from sandbox.harnesses.pins import CODEX
    from tests.sandbox.harnesses.support import store

    binary = store("codex").tree(CODEX) / "vendor/x86_64-unknown-linux-musl/bin/codex"
    provider = {"name": "lego", "base_url": f"{rollout.url}/v1", "env_key": "KEY", "wire_api": "responses", **provider}
    settings = {
        "model": '"policy"',
        "model_provider": '"lego"',
        **{f"model_providers.lego.{name}": json.dumps(value) for name, value in provider.items()},
        "check_for_update_on_startup": "false",
        "analytics.enabled": "false",
        "features.plugins": "false",
        "web_search": '"disabled"',
    }
    flags = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"]
    argv = [str(binary), "exec", *flags, *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")), "Fix calc.py."]
    return argv, {"HOME": str(home), "PATH": "/usr/bin:/bin", "TERM": "dumb", "KEY": rollout.key}


@pytest.mark.parametrize("context", [200_000])
@pytest.mark.parametrize("patience", [Patience(keep_alive=0.5)])
async def test_codex_takes_a_repeated_event_for_a_sign_of_life(rollout: Rollout, tmp_path: Path) -> None:
    """Its idle clock is set to 2 s and the engine is silent for longer: without `response.in_progress` it would connect again."""
    rollout.engine.script = ["<think>\nLook.\n</think>\n\n" + call("exec_command", "I list.", cmd="ls"), say("Done.")]
    rollout.engine.gate = asyncio.Event()
    argv, env = codex(rollout, tmp_path, stream_idle_timeout_ms=2000)
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(60):
        while not rollout.engine.started:  # noqa: ASYNC110 the engine is in another task of this loop and has no event for it
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)
        rollout.engine.gate.set()
        out, _ = await process.communicate()
    items = [event["item"] for line in out.splitlines() if (event := json.loads(line))["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] in ("reasoning", "agent_message")] == ["Look.", "I list.", "Done."]
    assert b"Reconnecting" not in out
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert (process.returncode, rollout.engine.started, sample.excluded) == (0, 2, None)


@pytest.mark.parametrize("max_turns", [1])
async def test_litellm_raises_what_mini_swe_agent_does_not_retry(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its abort list is ContextWindowExceeded, NotFound, Authentication, PermissionDenied and UnsupportedParams."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")

    async def ask(key: str = rollout.key, text: str = "Hello.") -> Any:
        messages = [{"role": "user", "content": text}]
        fields = {"model": "openai/policy", "messages": messages, "api_base": f"{rollout.url}/v1", "api_key": key}
        return await asyncio.to_thread(litellm.completion, **fields)

    with pytest.raises(litellm.exceptions.AuthenticationError):
        await ask(key="wrong")
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        await ask(text="x" * 30_000)
    rollout.engine.script = [call("bash", command="ls")]
    answer = await ask()
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"command": "ls"}'
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        await ask(text="One turn too many.")
    await rollout.close()
    with pytest.raises(litellm.exceptions.NotFoundError):
        await ask()
    assert rollout.engine.started == 1
