"""Diagnose a run: evidence from SQL, findings from the detectors, decisions of people beside them."""

from __future__ import annotations

import time

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import FindingRow, ReviewRow, Run
from ..schemas.checks import Diagnosis, Finding, Verdict
from ..settings import Settings
from .detectors import DETECTORS
from .evidence import load_pack
from .explain import ExplanationUnavailable, explain


def diagnose(session: Session, run_id: str) -> Diagnosis:
    """Findings as of now, each with the newest decision about it. Writes nothing."""
    pack = load_pack(session, run_id)
    findings = [_reviewed(session, finding) for detector in DETECTORS.values() for finding in detector(pack)]
    trials = sum(len(section) for section in pack.sections().values())
    count = "nothing found" if not findings else f"{len(findings)} candidate{'s' if len(findings) > 1 else ''}"
    return Diagnosis(run_id=run_id, summary=f"{count} in {trials} ended trials.", findings=findings, checked=list(DETECTORS))


def store(session: Session, diagnosis: Diagnosis) -> None:
    """Record the findings so that a decision can refer to them; an older record of the same finding is replaced."""
    for finding in diagnosis.findings:
        row = FindingRow(
            finding_id=finding.id,
            run_id=diagnosis.run_id,
            detector=finding.detector,
            title=finding.title,
            detail=finding.detail,
            fault=finding.fault,
            evidence=[e.model_dump(mode="json") for e in finding.evidence],
            time=time.time(),
        )
        session.merge(row)


def with_explanation(settings: Settings, diagnosis: Diagnosis, reviews: list[str]) -> Diagnosis:
    """The diagnosis with a language model's explanation. Raises ExplanationUnavailable."""
    if settings.anthropic_key_file is None:
        raise ExplanationUnavailable("no model is configured: start the server with --anthropic-key-file FILE")
    if not diagnosis.findings:
        return diagnosis
    import anthropic

    try:
        key = settings.anthropic_key_file.read_text().strip()
    except OSError as error:
        raise ExplanationUnavailable(f"the API key file {settings.anthropic_key_file} cannot be read: {error.strerror}") from error
    client = anthropic.Anthropic(api_key=key, base_url=settings.anthropic_base_url, timeout=60, max_retries=1)
    return diagnosis.model_copy(update={"explanation": explain(client, settings.anthropic_model, diagnosis.findings, reviews)})


def earlier_reviews(session: Session, run_id: str) -> list[str]:
    """Decisions about this run and about the runs before it, newest first, for the next diagnosis to know."""
    rows = session.execute(
        sa.select(FindingRow.title, FindingRow.run_id, ReviewRow.verdict, ReviewRow.note)
        .join(ReviewRow, ReviewRow.finding_id == FindingRow.finding_id)
        .join(Run, Run.run_id == FindingRow.run_id)
        .where(Run.created <= sa.select(Run.created).where(Run.run_id == run_id).scalar_subquery())
        .order_by(ReviewRow.review_id.desc())
        .limit(20)
    )
    return [f"{title} (run {run}): {verdict}{f', {note}' if note else ''}" for title, run, verdict, note in rows]


def _reviewed(session: Session, finding: Finding) -> Finding:
    newest = sa.select(ReviewRow).where(ReviewRow.finding_id == finding.id).order_by(ReviewRow.review_id.desc()).limit(1)
    decision = session.scalar(newest)
    if decision is None:
        return finding
    return finding.model_copy(update={"verdict": Verdict(decision.verdict), "note": decision.note})
