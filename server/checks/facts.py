"""What the rules look at. None: not gathered, because it was not asked for or could not be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.probes import ClusterFacts, DeviceFacts, HarnessRuntime, ModelFacts, SelfTestFacts


@dataclass(frozen=True, slots=True)
class PathFact:
    exists: bool
    is_dir: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class Room:
    """An interpreter that is to run a room. `problem` is empty when it answers; `versions` has None for a package it lacks."""

    python: str
    problem: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer[T]:
    """What a room's command said, or why it said nothing."""

    value: T | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    data_dir: Path
    data: PathFact
    paths: Mapping[str, PathFact]
    """RunSpec field → what lies there."""
    bind_problem: str
    memory_mb: int
    """Available now, within the control group's limit."""
    disk_mb: int
    """Free where the data directory lies."""
    cpus: int
    trainer: Room
    sandbox: Room
    pins: Mapping[str, Mapping[str, str]]
    """Room → package → version that this program is made for."""
    model: Answer[ModelFacts] | None = None
    harnesses: Answer[list[HarnessRuntime]] | None = None
    selftest: Answer[SelfTestFacts] | None = None
    device: Answer[DeviceFacts] | None = None
    """Of `trainer.device: cuda`, where this machine's environment is the trainer's."""
    cluster: Answer[ClusterFacts] | None = None
    """Of `trainer.launcher: kubernetes`."""
    listens: str = ""
    """URL of this server, as it knows itself."""
    loopback: bool = True
    """Whether only this machine reaches it there."""
    hostnames: tuple[str, ...] = ()
    """Further names that it answers to."""
