"""Token ids of a trial's turns, from its capture file, without numpy."""

from __future__ import annotations

import hashlib
from array import array

from ..schemas.capture import CaptureRecord, ContextTokens, TurnTokens
from ..schemas.capturefile import IDS, LOG_PROBS, CaptureFileError, Members, NodeEntry, opened
from ..schemas.rundir import RunDir
from .files import Missing, inside


def turn_tokens(run: RunDir, record: CaptureRecord, turn: int) -> TurnTokens:
    """What one model call added and what the engine answered. Raises Missing."""
    if record.file is None:
        raise Missing(f"the tokens of trial {record.trial_id} were not kept: reporting.keep_captures is off, or the disk was full")
    path = inside(run, record.file.path)
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.file.sha256:
                raise Missing(f"{record.file.path} is not the file that the record of trial {record.trial_id} names: its SHA-256 differs")
            with opened(file) as members:
                return _tokens(members, record, turn)
    except CaptureFileError as error:
        raise Missing(f"{record.file.path}: {error}") from None


def _tokens(members: Members, record: CaptureRecord, turn: int) -> TurnTokens:
    nodes = members.graph.nodes
    number = next((i for i, node in enumerate(nodes) if node.turn and node.turn.index == turn), None)
    if number is None:
        raise Missing(f"trial {record.trial_id} has no turn {turn}: its turns are 0 to {len(record.turns) - 1}")
    ids = array("i", members.array(IDS, "<i4", (members.tokens,)))
    starts = _starts([node.tokens for node in nodes])
    sampled = [node.tokens - node.turn.scaffold if node.turn else 0 for node in nodes]
    log_probs = array("f", members.array(LOG_PROBS, "<f4", (sum(sampled),)))
    node, at, behind = nodes[number], starts[number], _starts(sampled)[number]
    scaffold = node.tokens - sampled[number]
    context = _behind_last_turn(nodes, number)
    before = node.turn.prompt_tokens - scaffold - sum(nodes[i].tokens for i in context) if node.turn else 0
    return TurnTokens(
        turn=turn,
        start=before,
        context=[ContextTokens(role=nodes[i].role, ids=ids[starts[i] : starts[i] + nodes[i].tokens].tolist()) for i in context],
        scaffold=ids[at : at + scaffold].tolist(),
        sampled=ids[at + scaffold : at + node.tokens].tolist(),
        log_probs=log_probs[behind : behind + sampled[number]].tolist(),
        policy_versions=node.turn.spans if node.turn else [],
    )


def _behind_last_turn(nodes: list[NodeEntry], number: int) -> list[int]:
    """Nodes between a turn and the turn before it on its path, in order; a root owns nothing and is left out."""
    found: list[int] = []
    parent = nodes[number].parent
    while parent is not None and parent < number and nodes[parent].turn is None:
        if nodes[parent].parent is not None:
            found.append(parent)
        number, parent = parent, nodes[parent].parent
    return found[::-1]


def _starts(sizes: list[int]) -> list[int]:
    """Where each of the pieces that lie end to end begins."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
