"""What each harness sends, as the proxy reads it: the opening, a turn of the policy, and the answer to a command.

The opening is a recorded request (`probes/`), parsed by the proxy's own dialect, with its task and its machine-dependent text replaced.
Tests compare every message here with recordings of the unmodified harness.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.rendering import Parsed

PROBES = Path(__file__).parent / "probes"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True, slots=True)
class Probe:
    """A recorded first request of a harness and the task that it was given."""

    task: str
    request: Request

    @classmethod
    def load(cls, name: str, dialect: Dialect) -> Probe:
        recorded = json.loads((PROBES / f"{name}.json").read_text(encoding="utf-8"))
        return cls(recorded["task"], dialect.parse(recorded["request"], {}))


class Harness(Protocol):
    """How one harness talks to its model."""

    probes: tuple[Probe, Probe]
    """Two openings with different tasks on different machines."""
    scaffold: tuple[str, ...]
    """Fixed text of turns and answers that becomes one token each."""

    def opening(self, issue: str, rng: random.Random) -> list[Message]:
        """The messages of the first request, with random machine-dependent text."""
        ...

    def turn(self, text: str, command: str | None, call_id: str) -> Message:
        """What the policy says to run `command`, or to end the work when it is None."""
        ...

    def answer(self, command: str, returncode: int, output: str, call_id: str) -> Message:
        """What the harness sends back after running a command."""
        ...

    def commands(self, parsed: Parsed) -> list[str] | None:
        """The shell commands of a sampled turn; empty when it ends the work, None when the harness would refuse it."""
        ...


class MiniSweAgent:
    """mini-swe-agent 2.4.6: one tool `bash`, observations as JSON in Jinja's `tojson` spelling, work ends with a sentinel command."""

    scaffold: tuple[str, ...] = (
        "assistant\n",
        '\n{"name": "bash", "arguments": {"command": "',
        '"}}\n',
        '\n{\n  "returncode": 0,\n  "output": "',
        '\n{\n  "returncode": ',
        ',\n  "output": "',
        '"\n}\n',
        SUBMIT,
    )

    def __init__(self) -> None:
        self.probes = (Probe.load("mini-swe-agent-a", OpenAIChat()), Probe.load("mini-swe-agent-b", OpenAIChat()))

    def opening(self, issue: str, rng: random.Random) -> list[Message]:
        probe = self.probes[0]
        system, user = probe.request.messages
        machine = f"<system_information>\n{random_machine(rng)}\n</system_information>"
        text = re.sub(r"<system_information>\n.*\n</system_information>", machine, user.content.replace(probe.task, issue))
        return [system, replace(user, content=text)]

    def turn(self, text: str, command: str | None, call_id: str) -> Message:
        return Message("assistant", text, (ToolCall(call_id, "bash", {"command": SUBMIT if command is None else command}),))

    def answer(self, command: str, returncode: int, output: str, call_id: str) -> Message:
        quoted = json.dumps(output)
        for character in "<>&'":  # markupsafe.htmlsafe_json_dumps, which is what Jinja's tojson is
            quoted = quoted.replace(character, f"\\u{ord(character):04x}")
        return Message("tool", f'{{\n  "returncode": {returncode},\n  "output": {quoted}\n}}', tool_call_id=call_id)

    def commands(self, parsed: Parsed) -> list[str] | None:
        commands = called(parsed, "bash")
        return [] if commands == [SUBMIT] else commands or None


class ClaudeCode:
    """Claude Code 2.1.332 with `--bare`: tool `Bash` among three, output without its last newline, work ends with a turn of plain text."""

    scaffold: tuple[str, ...] = (
        "assistant\n",
        '\n{"name": "Bash", "arguments": {"command": "',
        '"}}\n',
        "Done.",
        "(Bash completed with no output)",
        "[This command modified 1 file you've previously read: ",
        ". Call Read before editing.]",
        "Exit code ",
        "):\n    return ",
        "\n\n\n",
    )

    def __init__(self) -> None:
        self.probes = (Probe.load("claude-code-a", Anthropic()), Probe.load("claude-code-b", Anthropic()))

    def opening(self, issue: str, rng: random.Random) -> list[Message]:
        system, user = self.probes[0].request.messages
        text = re.sub(r"CWD: .*\nDate: [0-9-]+", f"CWD: {random_folder(rng)}\nDate: {random_date(rng)}", system.content)
        return [replace(system, content=text), replace(user, content=issue)]

    def turn(self, text: str, command: str | None, call_id: str) -> Message:
        return Message("assistant", text, () if command is None else (ToolCall(call_id, "Bash", {"command": command}),))

    def answer(self, command: str, returncode: int, output: str, call_id: str) -> Message:
        text = output.rstrip("\n")
        if returncode:
            text = f"Exit code {returncode}" + (f"\n{text}" if text else "")
        elif command.startswith("sed -i ") and not text:  # the file was read by `cat` before
            text = f"[This command modified 1 file you've previously read: {command.rsplit(maxsplit=1)[-1]}. Call Read before editing.]"
        return Message("tool", text or "(Bash completed with no output)", tool_call_id=call_id)

    def commands(self, parsed: Parsed) -> list[str] | None:
        return called(parsed, "Bash")


class Codex:
    """Codex 0.171.0: tool `exec_command` among a dozen, answers with a random chunk id and the time taken, work ends with plain text."""

    scaffold: tuple[str, ...] = (
        "assistant\n",
        '\n{"name": "exec_command", "arguments": {"cmd": "',
        '"}}\n',
        "Done.",
        "  <cwd>",
        "</cwd>\n  <shell>",
        "</shell>\n  <current_date>",
        "</current_date>\n  <timezone>",
        "</timezone>\n  <filesystem><workspace_roots><root>",
        "</root></workspace_roots>"
        '<permission_profile type="disabled"><file_system type="unrestricted" /></permission_profile></filesystem>',
        "\n</environment_context>",
        "\nChunk ID: ",
        "\nWall time: ",
        " seconds\nProcess exited with code ",
        "\nOriginal token count: ",
        "\nOutput:\n",
        "):\n    return ",
        "\n\n\n",
    )

    def __init__(self) -> None:
        self.probes = (Probe.load("codex-a", OpenAIResponses()), Probe.load("codex-b", OpenAIResponses()))

    def opening(self, issue: str, rng: random.Random) -> list[Message]:
        probe, folder = self.probes[0], random_folder(rng)
        system, surroundings, user = probe.request.messages
        text = surroundings.content
        for tag, value in (
            ("cwd", folder),
            ("root", folder),
            ("shell", rng.choice(("sh", "sh", "bash", "zsh"))),
            ("current_date", random_date(rng)),
            ("timezone", rng.choice(("Etc/UTC", "Etc/UTC", "UTC", "Europe/Berlin", "America/New_York", "Asia/Shanghai"))),
        ):
            text = re.sub(f"<{tag}>.*</{tag}>", f"<{tag}>{value}</{tag}>", text)
        return [system, replace(surroundings, content=text), replace(user, content=issue)]

    def turn(self, text: str, command: str | None, call_id: str) -> Message:
        return Message("assistant", text, () if command is None else (ToolCall(call_id, "exec_command", {"cmd": command}),))

    def answer(self, command: str, returncode: int, output: str, call_id: str) -> Message:
        """What is random in it follows from the rest."""
        chance = hashlib.sha256(f"{call_id}/{command}/{output}".encode()).hexdigest()
        seconds = "0.0000" if chance[0] < "c" else f"0.{int(chance[1:9], 16) % 10_000:04d}"
        head = f"Chunk ID: {chance[-6:]}\nWall time: {seconds} seconds\nProcess exited with code {returncode}\n"
        count = -(-len(output.encode()) // 4)
        return Message("tool", f"{head}Original token count: {count}\nOutput:\n{output}", tool_call_id=call_id)

    def commands(self, parsed: Parsed) -> list[str] | None:
        return called(parsed, "exec_command", "cmd")


def called(parsed: Parsed, tool: str, argument: str = "command") -> list[str] | None:
    """The shell command of every call in a parsed turn; None when one of them is not usable."""
    commands: list[Any] = [
        call.arguments.get(argument) if call.name == tool and isinstance(call.arguments, dict) else None for call in parsed.calls
    ]
    return None if parsed.malformed or not all(isinstance(command, str) for command in commands) else commands


def random_folder(rng: random.Random) -> str:
    return rng.choice(("/workspace", "/workspace", "/app", "/testbed", "/repo", "/home/user/project"))


def random_date(rng: random.Random) -> str:
    return f"{rng.randint(2025, 2034)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def random_machine(rng: random.Random) -> str:
    """Something like a `uname` line. Kernels put free text there, so it has any length and any words: a policy must neither depend on the
    machine it was made on nor count the tokens of this line."""
    release = f"{rng.randrange(3, 8)}.{rng.randrange(20)}.{rng.randrange(130)}"
    return f"Linux {release}" + "".join(rng.choice("- - ._ #@+~:") + _machine_piece(rng) for _ in range(rng.randint(1, 18)))


def _machine_piece(rng: random.Random) -> str:
    how = rng.random()
    if how < 0.1:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(1, 5)))
    return rng.choice(_MACHINE_WORDS) if how < 0.6 else str(rng.randrange(1000))


_WORDS = """SMP PREEMPT DYNAMIC x86 64 aarch64 generic amd64 azure aws cloud Ubuntu Debian Alpine virt lts rt fc el rc microsoft standard
WSL2 GNU Mon Tue Wed Thu Fri Sat Sun Jan Jun Oct UTC arch zen pve deb kvm vm host build gke cos orbstack linuxkit"""
_MACHINE_WORDS = _WORDS.split()


HARNESSES: dict[str, Callable[[], Harness]] = {"claude-code": ClaudeCode, "codex": Codex, "mini-swe-agent": MiniSweAgent}
