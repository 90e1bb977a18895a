"""Our messages equal what the unmodified harness sent in a recorded session."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from trainer.capture.message import Message
from trainer.policies.conversations import HARNESSES, SUBMIT, ClaudeCode, Codex, MiniSweAgent
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.rendering import Parsed, ParsedCall

SOURCE = "def load(name):\n    return name.upper()\n\n\ndef quota(b, count):\n    return b * count\n"
FIX = "sed -i '/def load/,+1s|return .*|return name.split()|' grid.py"


def pairs(messages: tuple[Message, ...]) -> list[tuple[Message, Message]]:
    """(turn with a call, tool message) pairs."""
    return [(a, b) for a, b in itertools.pairwise(messages) if a.tool_calls]


def test_mini_swe_agent_messages(recorded: Path) -> None:
    body = json.loads((recorded / "mini-swe-agent.json").read_text())
    sent = pairs(OpenAIChat().parse(body, {}).messages)
    results = [(0, SOURCE), (0, ""), (1, ""), (0, "cat: nofile: No such file or directory\n<&>é")]
    harness = MiniSweAgent()
    assert len(sent) == len(results)
    for (turn, answer), (returncode, output) in zip(sent, results, strict=True):
        call = turn.tool_calls[0]
        assert harness.turn(turn.content, call.arguments["command"], call.id) == turn
        assert harness.answer(call.arguments["command"], returncode, output, call.id) == answer


def test_claude_code_messages(recorded: Path) -> None:
    read = json.loads((recorded / "claude-code.json").read_text())
    results = [(0, SOURCE), (0, ""), (0, "cat: nofile: No such file or directory\n<&>")]
    other = json.loads((recorded / "claude-code-unread.json").read_text())
    failed = [(0, SOURCE.replace("name.upper", "name.split")), (0, ""), (1, ""), (3, "hi\n")]
    harness = ClaudeCode()
    sent = pairs(Anthropic().parse(read, {}).messages)
    sent_other = pairs(Anthropic().parse(other, {}).messages)
    # The first command there edits a file that was not read before; the demonstrations never do that.
    assert sent_other[0][1].content == "(Bash completed with no output)"
    for (turn, answer), (returncode, output) in zip([*sent, *sent_other[1:5]], [*results, *failed], strict=True):
        call = turn.tool_calls[0]
        assert harness.turn(turn.content, call.arguments["command"], call.id) == turn
        assert harness.answer(call.arguments["command"], returncode, output, call.id) == answer


def test_codex_messages(recorded: Path) -> None:
    """But for the chunk's id and the time, which differ from run to run."""
    sent = pairs(OpenAIResponses().parse(json.loads((recorded / "codex.json").read_text()), {}).messages)
    file = "def load(ratio):\n    return int(ratio)\n\n\ndef combine(bottom, size):\n    return bottom + size\n"
    results = [(0, file), (0, ""), (0, "cat: nofile: No such file or directory\n<&>"), (1, ""), (3, "hi\n"), (0, "1\n2\n3\nx")]
    harness = Codex()
    assert len(sent) == len(results)
    for (turn, answer), (returncode, output) in zip(sent, results, strict=True):
        call = turn.tool_calls[0]
        assert harness.turn(turn.content, call.arguments["cmd"], call.id) == turn
        ours = harness.answer(call.arguments["cmd"], returncode, output, call.id)
        assert ours.tool_call_id == answer.tool_call_id and settled(ours.content) == settled(answer.content)


def settled(content: str) -> str:
    return re.sub(r"Chunk ID: [0-9a-f]{6}\nWall time: 0\.\d{4} s", "", content)


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_openings_equal_the_second_probe_but_for_the_machine(name: str) -> None:
    harness = HARNESSES[name]()
    ours = harness.opening(harness.probes[1].task, random.Random(0))
    machine = re.compile(r"<system_information>\n.*\n|CWD: .*\nDate: [0-9-]+|<(?:cwd|root|shell|current_date|timezone)>[^<]*")
    theirs = harness.probes[1].request
    assert [machine.sub("", message.content) for message in ours] == [machine.sub("", message.content) for message in theirs.messages]
    assert harness.probes[0].request.tools == theirs.tools


def parsed(*calls: ParsedCall, malformed: int = 0) -> Parsed:
    return Parsed("text", None, calls, malformed)


def test_what_ends_the_work() -> None:
    submit, look = ParsedCall("bash", {"command": SUBMIT}), ParsedCall("bash", {"command": "ls"})
    assert MiniSweAgent().commands(parsed(submit)) == []
    assert MiniSweAgent().commands(parsed(look)) == ["ls"]
    assert MiniSweAgent().commands(parsed()) is None
    assert MiniSweAgent().commands(parsed(ParsedCall("sh", {"command": "ls"}))) is None
    assert ClaudeCode().commands(parsed()) == []
    assert ClaudeCode().commands(parsed(ParsedCall("Bash", {"command": "ls"}))) == ["ls"]
    assert ClaudeCode().commands(parsed(malformed=1)) is None
    assert Codex().commands(parsed()) == []
    assert Codex().commands(parsed(ParsedCall("exec_command", {"cmd": "ls"}))) == ["ls"]
    assert Codex().commands(parsed(ParsedCall("exec_command", {"command": "ls"}))) is None
