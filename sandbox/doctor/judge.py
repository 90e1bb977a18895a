"""From facts to findings: pure, with the thresholds at the top."""

from __future__ import annotations

from collections.abc import Iterator

from server.schemas.machine import Health, MachineFinding

from .facts import Facts

CGROUPS = 50_000
PERCPU_MB = 20_000
"""Both grow when the kernel keeps cgroups of sandboxes that are long gone; starting one then takes minutes."""
DISK_USED, DISK_FREE_GB = 0.85, 20.0
SHARED_MEMORY = 0.5
SLOWER, AT_LEAST_S = 2.0, 0.1
"""The last quarter of a run's sandboxes takes that much longer than the first, and at least so long."""
_SHOWN = 3


def judge(facts: Facts) -> list[MachineFinding]:
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
        _left(
            "containers and pods",
            facts.elsewhere,
            "owners of containers or pods that are gone",
            "remove what is theirs with `rl doctor --sweep`; pods end by themselves when their time is over",
        ),
        *_machine(facts),
        *(_trend(facts)),
    ]


def _finding(check: str, bad: bool, message: str, hint: str) -> MachineFinding:
    return MachineFinding(check=check, state=Health.WARN if bad else Health.OK, message=message, hint=hint if bad else "")


def _left(check: str, found: list[str], what: str, hint: str) -> MachineFinding:
    if not found:
        return _finding(check, False, f"no {what.split(',', maxsplit=1)[0]}", "")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return _finding(check, True, f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}", hint)


def _machine(facts: Facts) -> Iterator[MachineFinding]:
    grown = facts.cgroups >= CGROUPS or facts.percpu_mb >= PERCPU_MB
    message = f"{facts.cgroups} memory cgroups, {facts.percpu_mb:.0f} MB held per CPU"
    yield _finding("kernel", grown, message, "the kernel keeps cgroups that are gone: restart the machine")
    used, free = facts.disk
    full = used > DISK_USED and free < DISK_FREE_GB
    yield _finding("disk", full, f"{used:.0%} used, {free:.0f} GB free where runs are kept", "remove runs that are no longer needed")
    number, layers, left = facts.images
    hint = "an interrupted fetch left something: `rl image prune --keep-gb 1000` removes that, a smaller number also images"
    yield _finding("images", left > 0, f"{number} images, {layers:.1f} GB" + (f", {left:.1f} GB unfinished" if left else ""), hint)
    crowded = facts.shared_memory > SHARED_MEMORY
    hint = "segments of trainers or engines that crashed: remove those that belong to no process"
    yield _finding("shared memory", crowded, f"{facts.shared_memory:.0%} of /dev/shm used", hint)


def _trend(facts: Facts) -> Iterator[MachineFinding]:
    for trend in facts.trends:
        slow = trend.last_s >= AT_LEAST_S and trend.last_s > SLOWER * trend.first_s
        message = f"{trend.first_s:g} s in the first quarter of {trend.trials} trials, {trend.last_s:g} s in the last"
        hint = "see the lines above; otherwise the machine is busier than it was"
        yield _finding(f"start of sandboxes in {trend.run}", slow, message, hint)
