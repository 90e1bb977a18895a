"""The doctor's rounds in a runner: what its machine looks like, as events, so that the status page can show it."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from server.schemas.events import MachineBody
from server.schemas.spool import Reporter

from .facts import gather
from .judge import judge

log = logging.getLogger(__name__)

EVERY_S = 60.0


async def watch(runs: Path, reporter: Reporter, every_s: float = EVERY_S) -> None:
    """Look and report, until cancelled. Start times are not among it: the server has those of every trial."""
    while True:
        try:
            reporter.report(await asyncio.to_thread(look, runs))
        except OSError as error:
            log.warning("cannot look at this machine: %s", error)
        await asyncio.sleep(every_s)


def look(runs: Path) -> MachineBody:
    facts = gather(runs, trends=False)
    figures = {
        "cgroups": facts.cgroups,
        "mount namespaces": facts.namespaces,
        "MB held per CPU": round(facts.percpu_mb, 1),
        "disk used": round(facts.disk[0], 4),
        "disk free GB": round(facts.disk[1], 1),
        "shared memory used": round(facts.shared_memory, 4),
    }
    return MachineBody(host=socket.gethostname() or "unnamed", findings=judge(facts), facts=figures)
