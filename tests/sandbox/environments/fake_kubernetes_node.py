"""The node of the fake cluster: pods as namespace sandboxes, with mounts, a network, execs, and ends of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from aiohttp import WSMsgType, web

from sandbox.environments.errors import SandboxError
from sandbox.environments.kubernetes.manifest import uid_of
from sandbox.environments.namespace.gate import Gate
from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.spec import Directory, RoMount, SandboxSpec
from server.schemas.runspec import Limits

if TYPE_CHECKING:
    from .fake_kubernetes import Faults, Store

Object = dict[str, Any]
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@dataclass(frozen=True)
class Image:
    """`files`: a directory of this machine with what an image volume or an init container takes from it; programs are the machine's own."""

    files: Path | None = None
    pull_s: float = 0
    refuses: str = ""
    """Why it cannot be pulled."""


@dataclass
class Container:
    sandbox: Sandbox
    cgroup: Path
    relays: dict[int, Gate]
    entered: bool = False


class Node:
    def __init__(self, host: Host, root: Path, images: dict[str, Image], store: Store, faults: Faults, enforce: bool) -> None:
        root.mkdir()
        self._host, self._root, self._images, self._store, self._faults = host, root, images, store, faults
        self.enforce = enforce
        self.containers: dict[str, Container] = {}
        self._counting: asyncio.Task[None] | None = None
        self.events: list[Object] = []
        self.pulled: list[str] = []
        self.pulling = 0
        self.most_pulling = 0
        self.most_starting = 0
        self.pids = 1024
        """That a pod may have."""

    # ---------------------------------------------------------------- life of a pod

    async def run(self, pod: Object) -> None:
        """What a kubelet does with a pod that was assigned to it."""
        name = pod["metadata"]["name"]
        self._say(pod, "Pending", conditions=[{"type": "PodScheduled", "status": "True"}])
        pending = [item for (kind, _), item in self._store.objects.items() if kind == "pods" and item["status"]["phase"] == "Pending"]
        self.most_starting = max(self.most_starting, len(pending))
        for container in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]):
            if why := await self._pull(container["image"]):
                self._state(pod, container, {"waiting": {"reason": "ErrImagePull", "message": why}}, "Pending")
                return
        for volume in pod["spec"].get("volumes", []):
            if "hostPath" in volume and not Path(volume["hostPath"]["path"]).exists():
                message = (
                    f'MountVolume.SetUp failed for volume "{volume["name"]}" : hostPath type check failed: {volume["hostPath"]["path"]} is'
                )
                self.events.append({"involved": name, "reason": "FailedMount", "message": f"{message} not a file"})
                return
        copied = await self._init(pod)
        spec = self._spec(pod, copied)
        self.containers[name] = container = Container(await self._host.create(spec), self._cgroup(name), {})
        if ("pods", name) not in self._store.objects:
            await self.end(name)
            return
        main = pod["spec"]["containers"][0]
        if main["command"][0] == "/bin/true":
            await self.end(name)
            self._state(pod, main, {"terminated": {"exitCode": 0, "reason": "Completed"}}, "Succeeded")
            return
        await self.apply_policies()
        self._state(pod, main, {"running": {}}, "Running", ready=False)
        await asyncio.sleep(self._faults.slow_exec_s)
        container.entered = True
        self._state(pod, main, {"running": {}}, "Running", ready=True)
        await asyncio.sleep(pod["spec"]["activeDeadlineSeconds"])
        await self.fail(name, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")

    async def _pull(self, reference: str) -> str:
        image = self._images.get(reference)
        if image is None or image.refuses:
            return (image.refuses if image else "") or f'failed to resolve reference "{reference}": not found'
        self.pulling += 1
        self.most_pulling = max(self.pulling, self.most_pulling)
        await asyncio.sleep(image.pull_s)
        self.pulling -= 1
        self.pulled.append(reference)
        return ""

    async def _init(self, pod: Object) -> Path | None:
        """Init containers run in sandboxes of their own; what they leave in the shared volume is copied out."""
        for container in pod["spec"].get("initContainers", []):
            files = self._images[container["image"]].files
            assert files is not None
            mounts = tuple(RoMount(files / path.lstrip("/"), path) for path in container["command"][6:] if path != sys.base_prefix)
            spec = SandboxSpec(
                workdir="/pod", mounts=mounts, directories=(Directory("/runtime", "root"),), limits=_limits(container, self.pids)
            )
            sandbox = await self._host.create(spec)
            # The interpreter's own prefix is there anyway, and too large for the memory that such a sandbox lies in.
            command = ["/etc/hosts" if word == sys.base_prefix else word for word in container["command"]]
            done = await sandbox.exec(command, user="root")
            assert done.return_code == 0, done
            target = self._root / pod["metadata"]["name"] / "runtime"
            await sandbox.download("/runtime", target, user="root")
            await sandbox.destroy()
            return target
        return None

    def _spec(self, pod: Object, copied: Path | None) -> SandboxSpec:
        container = pod["spec"]["containers"][0]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        name = pod["metadata"]["name"]
        mounts, directories = [RoMount(self._cgroup(name), "/sys/fs/cgroup"), RoMount(self._users(name), "/etc/passwd")], []
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if mount["mountPath"] == sys.base_prefix:
                continue  # every namespace sandbox has it
            if "hostPath" in volume:
                mounts.append(RoMount(Path(volume["hostPath"]["path"]), mount["mountPath"]))
            elif "image" in volume:
                files = self._images[volume["image"]["reference"]].files
                assert files is not None
                mounts.append(RoMount(files / mount["subPath"], mount["mountPath"]))
            elif copied is not None:
                mounts.append(RoMount(copied / mount["subPath"], mount["mountPath"]))
            else:
                directories.append(Directory(mount["mountPath"], "root"))
        return SandboxSpec(workdir="/pod", mounts=tuple(mounts), directories=tuple(directories), limits=_limits(container, self.pids))

    def _users(self, name: str) -> Path:
        """These sandboxes keep their own /etc/passwd read-only, so what a runner would write there is there from the beginning."""
        path = self._root / name / "passwd"
        path.write_text(f"root:x:0:0::/root:/bin/sh\nagent:x:{uid_of(name)}:{uid_of(name)}::/home/agent:/bin/sh\n")
        return path

    def _cgroup(self, name: str) -> Path:
        path = self._root / name / "cgroup"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def can_enter(self, name: str) -> bool:
        return name in self.containers and self.containers[name].entered

    async def end(self, name: str) -> None:
        container = self.containers.pop(name, None)
        if container is not None:
            for relay in container.relays.values():
                await relay.close()
            await container.sandbox.destroy()

    async def fail(self, name: str, reason: str, message: str, over: Object | None = None) -> None:
        """End a pod as a node does: its containers go, the object stays and says why."""
        pod = self._store.objects["pods", name]
        await self.end(name)
        pod["status"] |= {"phase": "Failed", "reason": reason, "message": message}
        if over is not None:
            pod["status"] |= {"containerStatuses": [{"name": "main", "ready": False, "state": {"terminated": over}}]}
        self._store.put("pods", pod, "MODIFIED")

    def _say(self, pod: Object, phase: str, **more: Any) -> None:
        pod["status"] |= {"phase": phase, **more}
        self._store.put("pods", pod, "MODIFIED")

    def _state(self, pod: Object, container: Object, state: Object, phase: str, ready: bool = False) -> None:
        image_id = "" if "waiting" in state else f"{container['image']}@sha256:0"
        status = {"name": container["name"], "image": container["image"], "imageID": image_id, "ready": ready, "state": state}
        if ("pods", pod["metadata"]["name"]) in self._store.objects:
            self._say(pod, phase, podIP="127.0.0.1", containerStatuses=[status])

    async def stop(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        for name in list(self.containers):
            await self.end(name)

    # ---------------------------------------------------------------- network

    async def apply_policies(self) -> None:
        """Give every pod a way to the ports of this machine that the policies leave it: all of them, where none counts."""
        for name, container in list(self.containers.items()):
            wanted = self._allowed(name)
            for port in set(container.relays) - wanted:
                await container.relays.pop(port).close()
            for port in wanted - set(container.relays):
                with contextlib.suppress(SandboxError):  # a sandbox that ends, or a port that its own programs use
                    _, fds = await container.sandbox._control.ask({"op": "listen", "port": port})
                    container.relays[port] = relay = Gate(socket.socket(fileno=fds[0]), "127.0.0.1", port)
                    await relay.open()

    def _allowed(self, name: str) -> set[int]:
        pod = self._store.objects.get(("pods", name))
        labels = pod["metadata"].get("labels", {}) if pod else {}
        policies = [
            policy["spec"]
            for policy in self._store.listing("networkpolicies", "")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items() and "Egress" in policy["spec"]["policyTypes"]
        ]
        if not self.enforce or not policies:
            connections = psutil.Process().net_connections("tcp")
            return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        rules = [rule for policy in policies for rule in policy["egress"]]
        return {port["port"] for rule in rules for port in rule["ports"] if rule["to"] == [{"ipBlock": {"cidr": "127.0.0.1/32"}}]}

    # ---------------------------------------------------------------- exec

    async def exec(self, name: str, command: list[str], client: web.WebSocketResponse) -> None:
        """`v4.channel.k8s.io`: no end of input, a status at the end, and a process that does not care whether anybody listens."""
        container = self.containers[name]
        self._counting = self._counting or asyncio.create_task(self._count_all())
        await self.apply_policies()
        await self._count(container)
        drop = self._faults.drop_execs > 0
        self._faults.drop_execs -= drop
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        try:
            request = {"op": "exec", "argv": command, "env": _ENV, "cwd": "/", "user": "root"}
            call = await container.sandbox._control.call(request, (in_r, out_w, err_w))
        except SandboxError:
            for fd in (in_w, out_r, err_r):
                os.close(fd)
            return
        finally:
            for fd in (in_r, out_w, err_w):
                os.close(fd)
        loop = asyncio.get_running_loop()
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(in_w, "wb"))
        feeding = asyncio.create_task(_feed(client, writer))
        pumps = [asyncio.create_task(_pump(fd, channel, client, drop)) for fd, channel in ((out_r, 1), (err_r, 2))]
        try:
            status = await call.done
            await asyncio.gather(*pumps)
            if not client.closed and not drop:
                await client.send_bytes(b"\x03" + json.dumps(_status(os.waitstatus_to_exitcode(status))).encode())
        except (SandboxError, ConnectionError):
            if (
                container.sandbox._control.closed and self.containers.get(name) is container
            ):  # its process 1 was killed: nothing else can be
                over = {"reason": "OOMKilled", "exitCode": 137}
                await self.fail(name, "", "", over)
        finally:
            feeding.cancel()
            for pump in pumps:
                pump.cancel()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await client.close()

    async def _count_all(self) -> None:
        while True:
            for container in list(self.containers.values()):
                await self._count(container)
            await asyncio.sleep(0.5)

    async def _count(self, container: Container) -> None:
        """What the pod's own cgroup files say."""
        with contextlib.suppress(SandboxError):
            usage = await container.sandbox.usage()
            files = {
                "memory.events": f"oom_kill {usage.out_of_memory}\n",
                "memory.peak": f"{usage.memory_peak}\n",
                "cpu.stat": f"usage_usec {int(usage.cpu_s * 1e6)}\n",
                "pids.max": "1024\n",
            }
            for file, text in files.items():
                (container.cgroup / file).write_text(text)


def _limits(container: Object, pids: int) -> Limits:
    limits = container["resources"]["limits"]
    return Limits(
        memory_mb=max(32, int(limits["memory"].removesuffix("Mi"))),
        disk_mb=int(limits.get("ephemeral-storage", "64Mi").removesuffix("Mi")),
        processes=pids,
        cpu_s=600,
    )


async def _feed(client: web.WebSocketResponse, writer: asyncio.WriteTransport) -> None:
    async for message in client:
        if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
            writer.write(message.data[1:])


async def _pump(fd: int, channel: int, client: web.WebSocketResponse, drop: bool) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    try:
        while data := await reader.read(1 << 15):
            if drop and channel == 1:
                await client.close()
            with contextlib.suppress(ConnectionError, RuntimeError):  # nobody listens any more
                if not client.closed:
                    await client.send_bytes(bytes([channel]) + data)
    finally:
        transport.close()


def _status(code: int) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = code if code > 0 else 128 - code
    causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    message = f"command terminated with non-zero exit code: exit status {code}"
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": causes}
