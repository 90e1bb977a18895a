"""From facts to findings: pure, with the thresholds at the top."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from .facts import Facts

CGROUPS = 50_000
PERCPU_MB = 20_000
"""Both grow when the kernel keeps cgroups of sandboxes that are long gone; starting one then takes minutes."""
DISK_USED, DISK_FREE_GB = 0.85, 20.0
SHARED_MEMORY = 0.5
SLOWER, AT_LEAST_S = 2.0, 0.1
"""The last quarter of a run's sandboxes takes that much longer than the first, and at least so long."""
_SHOWN = 3


class Finding(NamedTuple):
    check: str
    state: Literal["ok", "warn"]
    message: str
    hint: str = ""


def judge(facts: Facts) -> list[Finding]:
    """One finding per check; every `warn` has a hint."""
    return [
        _left(
            "state", list(map(str, facts.abandoned)), "state directories of spawners that are gone", "remove them with `rl doctor --sweep`"
        ),
        _left(
            "cgroups",
            facts.groups,
            f"cgroups of spawners that are gone, {facts.group_processes} processes in them",
            "remove those of known runs with `rl doctor --sweep`, empty ones with rmdir",
        ),
        _left("mounts", facts.mounts, "mounts of sandboxes in the machine's own namespace", "unmount them: no sandbox needs them there"),
        _left(
            "spawners",
            list(map(str, facts.spawners)),
            "spawners whose owner is gone",
            "they end by themselves in seconds; end those that stay",
        ),
        *_machine(facts),
        *(_trend(facts)),
    ]


def _left(check: str, found: list[str], what: str, hint: str) -> Finding:
    if not found:
        return Finding(check, "ok", f"no {what.split(',', maxsplit=1)[0]}")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Finding(check, "warn", f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}", hint)


def _machine(facts: Facts) -> Iterator[Finding]:
    grown = facts.cgroups >= CGROUPS or facts.percpu_mb >= PERCPU_MB
    yield Finding(
        "kernel",
        "warn" if grown else "ok",
        f"{facts.cgroups} memory cgroups, {facts.percpu_mb:.0f} MB held per CPU",
        "the kernel keeps cgroups that are gone: restart the machine" if grown else "",
    )
    used, free = facts.disk
    full = used > DISK_USED and free < DISK_FREE_GB
    yield Finding(
        "disk",
        "warn" if full else "ok",
        f"{used:.0%} used, {free:.0f} GB free where runs are kept",
        "remove runs that are no longer needed" if full else "",
    )
    crowded = facts.shared_memory > SHARED_MEMORY
    yield Finding(
        "shared memory",
        "warn" if crowded else "ok",
        f"{facts.shared_memory:.0%} of /dev/shm used",
        "segments of trainers or engines that crashed: remove those that belong to no process" if crowded else "",
    )


def _trend(facts: Facts) -> Iterator[Finding]:
    for trend in facts.trends:
        slow = trend.last_s >= AT_LEAST_S and trend.last_s > SLOWER * trend.first_s
        yield Finding(
            f"start of sandboxes in {trend.run}",
            "warn" if slow else "ok",
            f"{trend.first_s:g} s in the first quarter of {trend.trials} trials, {trend.last_s:g} s in the last",
            "see the lines above; otherwise the machine is busier than it was" if slow else "",
        )
