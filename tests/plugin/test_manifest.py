import json
import os
import subprocess
from pathlib import Path

import anyio
import pytest

from plugin.mcp_server import build
from server.schemas.datadir import DataDir
from tests.support.claude_cli import claude_cli, claude_env

ROOT = Path(__file__).parents[2]
SKILLS = sorted(ROOT.glob("skills/*/SKILL.md"))


def test_there_is_one_skill_per_command() -> None:
    assert [path.parent.name for path in SKILLS] == ["check", "dashboard", "run", "status"]


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_is_short(path: Path) -> None:
    assert len(path.read_text().split()) <= 200


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_names_only_tools_that_exist(path: Path) -> None:
    listed = anyio.run(build(DataDir(Path("/none"))).list_tools)
    tools = {f"mcp__plugin_rl_control__{tool.name}" for tool in listed}
    named = {word.strip("`.,()") for word in path.read_text().split() if "mcp__" in word}
    assert named <= tools
    assert all(len(tool) <= 64 for tool in tools)


def test_the_run_skill_waits_for_a_person() -> None:
    header = (ROOT / "skills/run/SKILL.md").read_text().split("---")[1]
    assert "disable-model-invocation: true" in header
    assert "start_run" not in header, "starting asks for permission every time"


def test_the_launcher_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    launcher = tmp_path / "plugin" / "launch.sh"
    launcher.write_bytes((ROOT / "plugin/launch.sh").read_bytes())
    launcher.chmod(0o755)
    result = subprocess.run([launcher], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f"lego-rl is not installed in {tmp_path}: run 'make install' there, then reconnect with /mcp\n"


def test_the_launcher_is_executable() -> None:
    command = json.loads((ROOT / ".mcp.json").read_text())["mcpServers"]["control"]["command"]
    assert os.access(command.replace("${CLAUDE_PLUGIN_ROOT}", str(ROOT)), os.X_OK)


@pytest.mark.claude
def test_claude_code_accepts_the_plugin(tmp_path: Path) -> None:
    command = [claude_cli(), "plugin", "validate", ROOT, "--strict", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=claude_env(tmp_path), timeout=60)
    report = json.loads(result.stdout)
    assert report["success"], result.stdout
    assert report["provides"]["skills"] == ["rl:check", "rl:dashboard", "rl:run", "rl:status"]
