"""Every refusal is `{"detail": one line}`; a wrong spec adds `checks`, one per problem."""

from __future__ import annotations

import logging

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from .security import redact
from .spec import SpecError

log = logging.getLogger(__name__)


def no_run(run_id: str) -> HTTPException:
    return HTTPException(404, f"there is no run {run_id}: `rl status` lists the runs")


def install_handlers(app: FastAPI) -> None:
    @app.exception_handler(SpecError)
    def spec_error(_: Request, error: SpecError) -> JSONResponse:
        return JSONResponse({"detail": str(error), "checks": [check.model_dump(mode="json") for check in error.problems]}, 422)

    @app.exception_handler(SQLAlchemyError)
    def no_record(_: Request, error: SQLAlchemyError) -> JSONResponse:
        reason = redact(str(getattr(error, "orig", None) or error).strip().partition("\n")[0])
        log.warning("the record cannot be used: %s", reason)
        return JSONResponse({"detail": f"the record cannot be used: {reason}; see the disk and server.log"}, 503)

    @app.exception_handler(Exception)  # the framework logs it with its traceback
    def fault(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"the server itself failed ({type(error).__name__}): see server.log"}, 500)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": "; ".join(_line(detail) for detail in error.errors())}, 422)


def one_line(error: ValidationError) -> str:
    return "; ".join(_line(detail) for detail in error.errors(include_url=False, include_input=False)[:5])


def _line(detail: object) -> str:
    assert isinstance(detail, dict)  # noqa: S101 - pydantic's own shape
    where = ".".join(str(part) for part in detail["loc"] if part not in ("body", "query", "path"))
    return f"{where or 'body'}: {detail['msg']}"
