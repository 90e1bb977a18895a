"""Stand-in for the interpreter (`sys.executable`): asks the zygote to fork the program, or starts it for real.

Runs as `python -IS stand_in.py SOCKET REAL_PYTHON ARG...`, so it imports the standard library only and as little of that as it can.
It stays until the forked program ends, because Ray watches the process it started.
"""

import os
import sys

FORKED = ("default_worker.py", "setup_worker.py")


def main(socket_path: str, real: str, args: list[str]) -> None:
    program = _program(args)
    if program is None or not os.path.exists(socket_path):  # noqa: PTH110 pathlib costs an import
        os.execv(real, [real, *args])  # noqa: S606
    import array
    import json
    import select
    import socket

    parent = os.getppid()
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(socket_path)
        request = json.dumps({"argv": program, "env": dict(os.environ), "cwd": _cwd()}).encode()
        descriptors = array.array("i", [0, 1, 2])
        channel.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        channel.sendall(request)
    except OSError:  # the zygote is gone: a plain start does the same, slower
        os.execv(real, [real, *args])  # noqa: S606
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while not select.select([channel], [], [], 0.5)[0]:
        if os.getppid() != parent:  # whoever started us is gone; closing the channel ends the fork
            os._exit(1)
    code = channel.recv(1)
    os._exit(code[0] if code else 1)


def _program(args: list[str]) -> "list[str] | None":
    """argv of a program that the zygote can become; None for any other.

    Ray's setup_worker.py only applies the runtime environment and execs default_worker.py in a shell: done here, that is two process
    starts less per worker.
    """
    start = 0
    while start < len(args) and args[start] in ("-u", "-W", "ignore", "-B"):
        start += 1
    rest = args[start:]
    if not rest or os.path.basename(rest[0]) not in FORKED:  # noqa: PTH119
        return None
    if not rest[0].endswith("setup_worker.py"):
        return rest
    context: dict[str, dict[str, str]] = {}
    program = []
    for arg in rest[1:]:
        if arg.startswith("--serialized-runtime-env-context="):
            import json

            context = json.loads(arg.split("=", 1)[1] or "{}")
        elif not arg.startswith("--language="):
            program.append(arg)
    if context.get("command_prefix") or not program or not program[0].endswith("default_worker.py"):
        return None
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = os.path.expandvars(value)
    return program


def _cwd() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return "/"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
