"""Run a container tool in mount and process namespaces of its own, so that nothing it mounts or starts stays, and with no network but one
listener.

`python -I -S isolate.py SOURCE NETWORK DESCRIPTOR PORT PROGRAM …`, where SOURCE is the directory of this program's packages, NETWORK is
`host` or `none`, and the listener on 127.0.0.1:PORT is sent over the unix socket DESCRIPTOR; both are 0 for none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys


def main(source: str, network: str, descriptor: int, port: int, command: list[str]) -> None:
    sys.path.append(source)
    from sandbox.environments.namespace import kernel

    kernel.unshare(kernel.NEWNS | kernel.NEWPID | (kernel.NEWNET if network == "none" else 0))
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    kernel.die_with_parent()
    kernel.make_private("/")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    with contextlib.suppress(OSError):
        kernel.unmount("/sys/fs/cgroup/unified")  # crun refuses version 2 beside version 1
    if network == "none":
        kernel.loopback_up()
    if descriptor:
        with socket.socket(fileno=descriptor) as control, socket.create_server(("127.0.0.1", port)) as listener:
            socket.send_fds(control, [b"x"], [listener.fileno()])
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
