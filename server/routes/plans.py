"""Plans: what a spec amounts to, before anything starts."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from ..context import READ, WRITE, Ctx
from ..db.models import PlanRow
from ..runs.plans import expected_trials, make_plan
from ..schemas.api import SpecRequest
from ..schemas.checks import Plan, ResolvedSpec
from ..schemas.runspec import RunSpec
from ..spec import preset_names, resolve

router = APIRouter(prefix="/api", tags=["plans"])


@router.get("/presets", dependencies=[READ])
def presets() -> list[str]:
    return preset_names()


@router.post("/specs", dependencies=[READ])
def resolve_spec(request: SpecRequest) -> ResolvedSpec:
    """Also for machines whose directories this server cannot see."""
    resolved = resolve(request.document, request.overrides, request.base)
    return ResolvedSpec(spec=resolved.spec.model_dump(mode="json"), provenance=resolved.provenance)


@router.post("/plans", dependencies=[WRITE])
def create_plan(context: Ctx, request: SpecRequest) -> Plan:
    resolved = resolve(request.document, request.overrides, request.base)
    with context.db.write() as session:
        return make_plan(session, resolved)


@router.get("/plans/{digest}", dependencies=[READ])
def get_plan(context: Ctx, digest: str) -> Plan:
    with context.db.read() as session:
        row = session.get(PlanRow, digest)
        if row is None:
            raise HTTPException(404, f"there is no plan {digest}: make one with `rl run --plan` or the tool plan_run")
        return Plan(
            digest=row.digest,
            summary=row.summary,
            spec=row.spec,
            provenance=row.provenance,
            expected_trials=expected_trials(RunSpec.model_validate(row.spec)),
        )
