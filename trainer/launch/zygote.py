"""Warm fork: one process imports the stack, and every Ray worker is a fork of it (0.1 s instead of 6 s of imports each).

Ray starts workers with `sys.executable` and the runtime environment's `py_executable`. Both are set to a small script
(`stand_in.py`) that asks the zygote over a Unix socket to become the worker. Nothing of Ray or verl is edited, but three facts about Ray
are relied on, hence the version check: the names of the worker scripts, the arguments of setup_worker.py, and the two variables that
Ray's C++ part reads once per process. Where they may not hold, the run starts plainly.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import stand_in

RAY_VERSION = "2.60.0"
JOB_ID = "01000000"
"""Ray's id of the first job of a fresh cluster."""
DRAWS = 2000
"""Ids that a process may draw before it meets the ids of the next fork. Moving on by one costs about a microsecond."""
PRELOAD = (
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.experimental.agent_loop.agent_loop",
    "verl.experimental.reward_loop.reward_loop",
    "verl.utils.tracking",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.llm_server",
    "transfer_queue",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen2.tokenization_qwen2",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "ray.util.state",
    "ray._private.runtime_env.setup_hook",
    "trainer.rollout.manager",
)
PROXY = ("trainer.proxy.rendering", "trainer.proxy.service", "trainer.proxy.exporter")
"""What a worker needs and the launcher does not: half a second that passes beside the launcher's start of Ray."""


def obstacle() -> str | None:
    """Why warm fork cannot be used here; None when it can."""
    if sys.platform != "linux":
        return f"it needs Linux, not {sys.platform}"
    version = importlib.metadata.version("ray")
    if version != RAY_VERSION:
        return f"it was checked with ray {RAY_VERSION}, not {version}"
    workers = Path(str(importlib.metadata.distribution("ray").locate_file("ray/_private/workers")))
    missing = [name for name in stand_in.FORKED if not (workers / name).is_file()]
    return f"ray has no {' and no '.join(missing)}" if missing else None


def preload() -> None:
    """Import what the workers need.

    A fork keeps what ray's C++ part read at import: the job id, and the process whose death ends a worker (the launcher).

    Imports leave little garbage and a million objects that stay. Looking at those again and again took a fifth of the time.
    """
    gc.disable()
    per_worker = {"RAY_JOB_ID": JOB_ID, "RAY_RAYLET_PID": str(os.getpid())}
    os.environ.update(per_worker)
    importlib.import_module("ray._raylet")
    for name in per_worker:
        del os.environ[name]
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


@dataclass(frozen=True, slots=True)
class Zygote:
    pid: int
    executable: Path
    """To be used as `sys.executable`."""

    def stop(self) -> None:
        """It ends by itself soon after its parent; this is sooner."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start(directory: Path, modules: Sequence[str] = ()) -> Zygote:
    """Fork the zygote from this process, which has preloaded and runs no thread that matters. `directory` is private to the user; `modules`
    are imported by the zygote alone."""
    path = directory / "zygote.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    pid = os.fork()
    if pid == 0:
        try:
            _serve(listener, modules)
        finally:  # whatever happens here or in a fork of it must not unwind into the launcher's own clean-up
            os._exit(1)
    listener.close()
    executable = directory / "python"
    command = shlex.join([sys.executable, "-IS", str(Path(stand_in.__file__)), str(path), sys.executable])
    executable.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    executable.chmod(0o700)
    return Zygote(pid, executable)


def _serve(listener: socket.socket, modules: Sequence[str]) -> NoReturn:
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ray's setproctitle must find the original environ block before any fork changes it.
    sys.modules["ray._raylet"].setproctitle("lego-rl: zygote")  # type: ignore[attr-defined]
    for name in modules:
        importlib.import_module(name)
    gc.unfreeze()
    gc.collect()  # here, beside the launcher's own start
    gc.freeze()
    forks = 0
    while os.getppid() == parent:
        ready, _, _ = select.select([listener], [], [], 1.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if ready:
            channel, _ = listener.accept()
            forks += 1
            if os.fork() == 0:
                listener.close()
                _become(channel, forks)
            channel.close()
    os._exit(0)


def _become(channel: socket.socket, serial: int) -> NoReturn:
    """Turn this fork, the zygote's `serial`-th, into the program that the stand-in asked for; its exit code goes back over the channel."""
    code = 1
    try:
        request = _receive(channel)
        keep = channel.detach()
        _take_on(request)
        _part_from_siblings(serial)
        threading.Thread(target=_end_with, args=(keep,), name="stand-in", daemon=True).start()
        runpy.run_path(request["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 what an interpreter does at its top level
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(keep, bytes([code & 255]))
    os._exit(code)


def _receive(channel: socket.socket) -> dict[str, Any]:
    head, ancillary, _, _ = channel.recvmsg(8, socket.CMSG_SPACE(12))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2][:12])
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        data += channel.recv(size - len(data))
    request: dict[str, Any] = json.loads(data)
    return request


def _take_on(request: dict[str, Any]) -> None:
    """Environment, directory, argv and streams of the new program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wanted = request["env"]
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():  # only what differs: setproctitle owns the memory of the original block
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _part_from_siblings(serial: int) -> None:
    """Own random numbers for this fork.

    Ray draws object ids from a C++ generator whose state the forks share: two workers that start together would create the same object
    in the store and hang. There is no way to seed it, so every fork moves on by a different multiple of what a process draws in its life.
    """
    random.seed()
    sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    draw = sys.modules["ray._raylet"].UniqueID.from_random  # type: ignore[attr-defined]
    for _ in range(serial * DRAWS):
        draw()


def _end_with(keep: int) -> None:
    """End this process when its stand-in ends."""
    with contextlib.suppress(OSError):
        os.read(keep, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(2)
    os._exit(0)
