"""What every route needs, made once per app in its lifespan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from .changes import Changes
from .checks.service import CheckService
from .db import Database
from .launchers.process import ProcessLauncher
from .security import Guard
from .settings import Settings


@dataclass(frozen=True)
class Context:
    settings: Settings
    db: Database
    guard: Guard
    changes: Changes
    launcher: ProcessLauncher
    checks: CheckService


def get_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(get_context)]


def _require_read(request: Request, context: Ctx) -> None:
    context.guard.check_read(request)


def _require_write(request: Request, context: Ctx) -> None:
    context.guard.check_write(request)


READ = Depends(_require_read)
WRITE = Depends(_require_write)
