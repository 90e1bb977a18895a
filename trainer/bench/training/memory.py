"""Memory of a run's processes, by name, and how it grows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Held:
    """MB. `own` is shared with nobody; `part` counts a page that n processes share as 1/n."""

    name: str
    own: float
    part: float


Memory = Mapping[int, Held]
"""Of each process by its id."""


def look(pid: int) -> Memory:
    """A process and its descendants; one that ends meanwhile is left out."""
    found: dict[int, Held] = {}
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return found
    for process in processes:
        try:
            full = process.memory_full_info()
            found[process.pid] = Held(_title(process.cmdline()), full.uss / 1e6, full.pss / 1e6)
        except psutil.Error:
            continue
    return found


def _title(command: Sequence[str]) -> str:
    """Ray titles a worker `ray::Actor.method`; of another program its own name or, behind an interpreter, the script's or module's."""
    if not command:
        return "unnamed"
    if command[0].startswith("ray::"):
        return command[0].removeprefix("ray::").split(".")[0].rpartition(":")[2]
    words = [word for word in command if not word.startswith("-")]
    python = "python" in words[0].rpartition("/")[2] and len(words) > 1
    return words[python].rpartition("/")[2]


def total(memory: Memory) -> float:
    """MB of the whole run."""
    return sum(held.part for held in memory.values())


def growth(samples: Sequence[Memory]) -> dict[str, float]:
    """MB per sample of each name from behind the first tenth to the last, the fastest first; processes that were there at both ends."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth] or samples[:1], samples[-tenth:]
    distance = max(1, len(samples) - 1 - tenth)
    slopes: Counter[str] = Counter()
    for pid, held in late[-1].items():
        if all(pid in sample for sample in (*early, *late)):
            before, after = (statistics.median(sample[pid].own for sample in part) for part in (early, late))
            slopes[held.name] += (after - before) / distance  # type: ignore[assignment]
    return dict(slopes.most_common())
