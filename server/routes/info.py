"""What server this is."""

from __future__ import annotations

from fastapi import APIRouter

from ..context import READ, Ctx
from ..schemas.api import ServerInfo
from ..version import VERSION

router = APIRouter(prefix="/api", tags=["info"])


@router.get("/info", dependencies=[READ])
def info(context: Ctx) -> ServerInfo:
    return ServerInfo(
        version=VERSION,
        data_dir=str(context.settings.data_dir),
        database=context.db.shown,
        needs_token_to_read=not context.guard.open_reads,
    )


@router.get("/health")
def health() -> dict[str, str]:
    """Open to everyone and says nothing."""
    return {"status": "ok"}
