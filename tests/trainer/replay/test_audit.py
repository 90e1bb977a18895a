"""The audit finds what it is there to find: a sound capture is changed in one place, and the change is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from server.schemas.runspec import History, TrainRule
from tests.trainer.replay.made import assistant, chat, result, system, user, write
from trainer.capture.graph import Turn
from trainer.replay.play import Played, player
from trainer.replay.report import report

CALL = ("call_1", "bash", '{"command": "ls"}')
TASK = [system(), user("fix it")]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    path = write(tmp_path, chat(TASK, CALL), chat([*TASK, assistant(CALL), result("call_1")], say="done"))
    with player(History.KEEP) as play:
        return play(path)


def other_ids(turn: Turn) -> None:
    turn.ids[-2] += 1


def other_prompt(turn: Turn) -> None:
    turn.path()[1].ids[0] += 1


def other_log_probs(turn: Turn) -> None:
    turn.log_probs[0] -= 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (other_ids, "turn 0: its context is no prompt and answer of the engine"),
        (other_prompt, "turn 0: its context is no prompt and answer of the engine"),
        (other_log_probs, "turn 0: log-probabilities differ from the engine's"),
    ],
)
def test_a_change_is_named(change: Callable[[Turn], None], finding: str, played: Played) -> None:
    assert report(played, TrainRule.ALL_BRANCHES).violations == []
    change(played.capture.graph.turns[0])
    assert finding in report(played, TrainRule.ALL_BRANCHES).violations


def test_a_mask_that_is_shifted_makes_no_sample(played: Played) -> None:
    """User-pain 8: mask and log-probabilities of different lengths cannot be put together."""
    played.capture.graph.turns[0].scaffold -= 1
    with pytest.raises(ValueError):
        report(played, TrainRule.ALL_BRANCHES)
