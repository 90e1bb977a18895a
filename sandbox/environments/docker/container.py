"""How a container is confined: everything that its creation says about privileges, limits and reach. Pure."""

from __future__ import annotations

import json
from typing import Any

from sandbox.environments.spec import OPEN_FILES, UNWATCHED_CPU_S, SandboxSpec

AGENT = 61000
"""User and group of the agent: in no image, and no container's root may become it but the verifier's."""
OWNER, EXPIRES, TRIAL = "lego-rl.owner", "lego-rl.expires", "lego-rl.trial"
"""Labels of all that we make on an engine: the token of its owner, seconds since the epoch, the trial's name."""
_OURS = 3
"""Processes of ours in a container beside each command: its first two, and the one that starts the command."""
_FAMILIES = (1, 2, 10, 16)
_NEW_NAMESPACE = 0x7E020000
_MISSING = ["io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"]
_REFUSED = [
    *("pivot_root", "chroot", "mount", "umount2", "unshare", "setns"),
    *("acct", "swapon", "swapoff", "reboot", "quotactl", "quotactl_fd", "iopl", "ioperm"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("syslog", "perf_event_open", "bpf", "userfaultfd", "add_key", "request_key", "keyctl"),
    *("fanotify_init", "open_by_handle_at", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
]
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


def seccomp() -> str:
    """The system-call filter of the namespace backend in the engine's words, for the same reasons (`namespace/seccomp.py`)."""

    def rule(names: list[str], number: int, **argument: Any) -> dict[str, Any]:
        return {
            "names": names,
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": number,
            "args": [argument] if argument else [],
        }

    others = sorted(set(range(64)) - set(_FAMILIES))
    sockets = [rule(["socket", "socketpair"], _EAFNOSUPPORT, index=0, value=family, op="SCMP_CMP_EQ") for family in others]
    sockets.append(rule(["socket", "socketpair"], _EAFNOSUPPORT, index=0, value=64, op="SCMP_CMP_GE"))
    bits = [1 << bit for bit in range(32) if _NEW_NAMESPACE >> bit & 1]
    clones = [rule(["clone"], _EPERM, index=0, value=bit, valueTwo=bit, op="SCMP_CMP_MASKED_EQ") for bit in bits]
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [
                rule(_MISSING, _ENOSYS),
                rule(_REFUSED, _EPERM),
                rule(["prlimit64"], _EPERM, index=0, value=0, op="SCMP_CMP_NE"),
                *clones,
                *sockets,
            ],
        }
    )


def rlimits(spec: SandboxSpec) -> dict[str, int]:
    return {"CORE": 0, "CPU": spec.limits.cpu_s + UNWATCHED_CPU_S, "FSIZE": spec.limits.disk_mb << 20, "NOFILE": OPEN_FILES}


def host_config(spec: SandboxSpec, binds: dict[str, str], storage_opt: bool) -> dict[str, Any]:
    """Arguments of the SDK's `create_host_config`. `binds` is source → target of what is bound read-only from the engine's machine."""
    from docker.types import Mount  # the older `binds` make a directory on the engine's machine where a source is missing

    memory = spec.limits.memory_mb << 20
    return {
        "network_mode": "none",
        "ipc_mode": "private",
        "cap_drop": ["ALL"],
        # The verifier's root puts the check into the agent's hands, and ends what it leaves behind.
        "cap_add": ["SETUID", "SETGID", "KILL"] if spec.grading else [],
        "security_opt": ["no-new-privileges", f"seccomp={seccomp()}"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "shm_size": min(memory, 64 << 20),
        "pids_limit": spec.limits.processes + _OURS,
        "oom_score_adj": 500,
        "ulimits": [{"Name": name.lower(), "Soft": value, "Hard": value} for name, value in rlimits(spec).items()],
        "mounts": [Mount(target, source, type="bind", read_only=True) for source, target in binds.items()],
        "storage_opt": {"size": f"{spec.limits.disk_mb}m"} if storage_opt else None,
        "init": True,
        "log_config": {"Type": "none", "Config": {}},
        "restart_policy": {"Name": "no"},
    }


def creation(image: str, spec: SandboxSpec, seconds: int, labels: dict[str, str]) -> dict[str, Any]:
    """Arguments of the SDK's `create_container`, but for the host's part. The container ends by itself after `seconds`."""
    return {
        "image": image,
        "entrypoint": ["/bin/sh", "-c", f"exec sleep {seconds}"],
        "command": [],
        "user": "0:0",
        "working_dir": "/",
        "hostname": "sandbox",
        "network_disabled": True,
        "healthcheck": {"test": ["NONE"]},
        "labels": labels,
    }
