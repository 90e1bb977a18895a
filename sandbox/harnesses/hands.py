"""How a policy acts in each harness: the turn that lists, reads, edits, runs and finishes, in the harness's own tools.

For checks that put a script in the policy's place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from server.schemas.scripted import ScriptedCall, ScriptedTurn


class Hands(NamedTuple):
    run: Callable[[str], ScriptedTurn]
    """A shell command."""
    read: Callable[[str], ScriptedTurn]
    """A file, by its absolute path."""
    edit: Callable[[str, str, str], ScriptedTurn]
    """In a file (absolute path), replace a text that stands there once."""
    finish: tuple[ScriptedTurn, ...]


def turn(tool: str, /, **arguments: Any) -> ScriptedTurn:
    return ScriptedTurn(text="Next step.", calls=[ScriptedCall(name=tool, arguments=arguments)])


DONE = ScriptedTurn(text="Done: the function is repaired.")


def _replace(path: str, old: str, new: str) -> str:
    """The edit as a shell command, for harnesses that have only a shell."""
    program = f"import pathlib; p = pathlib.Path({path!r}); p.write_text(p.read_text().replace({old!r}, {new!r}))"
    return "python3 -c " + "'" + program.replace("'", "'\"'\"'") + "'"


def _shell_only(run: Callable[[str], ScriptedTurn], *finish: ScriptedTurn) -> Hands:
    return Hands(run, lambda path: run(f"cat {path}"), lambda path, old, new: run(_replace(path, old, new)), finish)


def _keys(command: str = "", done: bool = False) -> ScriptedTurn:
    """A turn of Terminus 2, which reads JSON in the text."""
    commands = [{"keystrokes": command + "\n", "duration": 0.1}] if command else []
    return ScriptedTurn(text=json.dumps({"analysis": "Clear.", "plan": "Go on.", "commands": commands, "task_complete": done}))


HANDS: dict[str, Hands] = {
    "mini-swe-agent": _shell_only(
        lambda command: turn("bash", command=command), turn("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    ),
    "claude-code": Hands(
        lambda command: turn("Bash", command=command, description="Next step"),
        lambda path: turn("Read", file_path=path),
        lambda path, old, new: turn("Edit", file_path=path, old_string=old, new_string=new),
        (DONE,),
    ),
    "opencode": Hands(
        lambda command: turn("bash", command=command, description="Next step"),
        lambda path: turn("read", filePath=path),
        lambda path, old, new: turn("edit", filePath=path, oldString=old, newString=new),
        (DONE,),
    ),
    "openhands": Hands(
        lambda command: turn("terminal", command=command),
        lambda path: turn("file_editor", command="view", path=path),
        lambda path, old, new: turn("file_editor", command="str_replace", path=path, old_str=old, new_str=new),
        (turn("finish", message="Done."),),
    ),
    "codex": _shell_only(lambda command: turn("exec_command", cmd=command), DONE),
    "terminus-2": _shell_only(_keys, _keys(done=True), _keys(done=True)),
}
