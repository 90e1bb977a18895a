"""A browser trades the token for a cookie, once, so that pages can be read from elsewhere and written to."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from fastapi.responses import RedirectResponse

from ..context import Ctx
from ..security import COOKIE

router = APIRouter(tags=["login"])


@router.get("/login", include_in_schema=False)
def login(context: Ctx, token: str) -> RedirectResponse:
    if not context.guard.is_token(token):
        raise HTTPException(401, "wrong token: it is in the file `token` in the server's data directory")
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", max_age=30 * 86400)
    return answer
