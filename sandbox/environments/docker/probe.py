"""Before a run: do the engine's containers hold? One is made as an agent's is, and tries what an agent would."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandbox.environments.errors import SandboxError
from sandbox.environments.spec import ExecResult, SandboxSpec
from server.schemas.runspec import Sandbox as Settings

if TYPE_CHECKING:
    from .host import DockerHost

_NEVER = [
    *(("169.254.169.254", 80), ("169.254.169.254", 53), ("192.0.2.1", 443), ("1.1.1.1", 53), ("172.17.0.1", 22)),
    *(("2001:db8::1", 443), ("fd00:ec2::254", 80), ("fe80::1", 80)),
]
"""Metadata services, the default bridge's gateway, and the world. Nothing answers at some of them, so the error is what counts."""
_KERNELS_OWN = ("lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0")
"""Kernels with tunnels built in show them, down and with no other end, in every network namespace."""
_LOOK = """
import errno, json, socket, sys
found = {"open": [], "interfaces": [], "status": {}}
for host, port in json.loads(sys.argv[1]):
    near = host in ("127.0.0.1", "::1")
    for kind in (socket.SOCK_STREAM,) if near else (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try: made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT: continue  # a machine without IPv6
            raise
        with made as connection:
            connection.settimeout(2)
            try: connection.connect((host, port))
            except OSError as error:
                if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EINVAL): continue
                if error.errno == errno.ECONNREFUSED and near: continue
            found["open"].append(f"{host}:{port}")
try:
    socket.getaddrinfo("example.com", 80)
    found["open"].append("DNS")
except OSError: pass
for line in open("/proc/net/dev").read().splitlines()[2:]:
    found["interfaces"].append(line.split(":")[0].strip())
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    found["status"][name] = value.split()
print(json.dumps(found))
"""
_TALK = "import socket; s = socket.create_connection(('127.0.0.1', 8000), 5); s.sendall(b'probe\\n'); print(s.recv(99).decode())"


async def hold(host: DockerHost, settings: Settings) -> None:
    """Raise SandboxError where an agent would get out, or would not get to its proxy."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    agents = SandboxSpec(image=settings.image, limits=settings.limits, name="probe")
    try:
        walls, grading = await asyncio.gather(_walls(host, agents, port), _grading(host, replace(agents, grading=True)))
    finally:
        server.close()
    if found := [*walls, *grading]:
        raise SandboxError(f"containers of {host.label} do not hold, so none is used: {'; '.join(found)}")


async def _walls(host: DockerHost, spec: SandboxSpec, port: int) -> list[str]:
    sandbox = await host.create(spec)
    try:
        argument = json.dumps([*_NEVER, ("127.0.0.1", port), ("::1", port)])
        try:
            found = judge(await sandbox.exec([host.python, "-I", "-S", "-B", "-c", _LOOK, argument], timeout_s=120))
        except SandboxError as error:
            return [
                f"nothing can be run in {spec.image} ({error}); it needs /bin/sh, and the C library that this runner's Python is built for"
            ]
        await sandbox.open_gate("127.0.0.1", port)
        talked = await sandbox.exec([host.python, "-I", "-S", "-B", "-c", _TALK], timeout_s=30)
        if talked.stdout != b"probe\n\n":
            found.append(f"it did not reach the proxy through its gate: {_tail(talked)}")
        await sandbox.close_gate()
        if (await sandbox.exec([host.python, "-I", "-S", "-B", "-c", _TALK], timeout_s=30)).return_code == 0:
            found.append("its gate was still open after it had been closed")
        return found
    finally:
        await sandbox.destroy()


async def _grading(host: DockerHost, spec: SandboxSpec) -> list[str]:
    """A verifier's root has to become the agent, for good."""
    sandbox = await host.create(spec)
    try:
        code = f"import os; os.setgroups([]); os.setresgid(*[{sandbox.uid}] * 3); os.setresuid(*[{sandbox.uid}] * 3); print('done')"
        done = await sandbox.exec([host.python, "-I", "-S", "-B", "-c", code], user="root", timeout_s=30)
    except SandboxError:
        return []  # the other one tells
    finally:
        await sandbox.destroy()
    return [] if done.stdout == b"done\n" else [f"a verifier's root cannot become the agent: {_tail(done)}"]


def judge(looked: ExecResult) -> list[str]:
    """What is wrong, in words. Pure."""
    try:
        seen: dict[str, Any] = json.loads(looked.stdout)
    except ValueError:
        return [f"it did not say what it sees: {_tail(looked)}"]
    found = [f"it is not cut off from {', '.join(seen['open'])}"] if seen["open"] else []
    others = [name for name in seen["interfaces"] if name not in _KERNELS_OWN]
    found += [f"it has network interfaces: {', '.join(others)}"] if others else []
    status = seen["status"]
    held = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[name][0], 16)]
    found += [f"its processes hold capabilities ({', '.join(held)})"] if held else []
    if status.get("NoNewPrivs") != ["1"] or status.get("Seccomp") != ["2"]:
        found.append("its processes can gain privileges, or their system calls are not filtered")
    return found


def _tail(result: ExecResult) -> str:
    return (result.stderr or result.stdout).decode(errors="replace").strip()[-300:] or f"exit {result.return_code}"
