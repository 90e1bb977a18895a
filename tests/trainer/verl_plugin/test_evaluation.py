from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.schemas.events import EventBody
from server.schemas.outcome import Scored, Termination
from server.schemas.rundir import BestFile, RunDir
from server.schemas.runspec import Data, Harness, Model, RunSpec
from server.schemas.states import Phase
from trainer.checkpoints.kept import read_best, weights
from trainer.rollout.groups import Group
from trainer.rollout.manager import PlayedGroup
from trainer.rollout.trial import Rollout
from trainer.verl_plugin.trainer import LegoSync


class Killed(BaseException):
    pass


class Dying:
    """A reporter whose process is killed while it reports."""

    def report(self, body: EventBody) -> None:
        raise Killed(body)


def test_an_evaluation_that_was_reported_has_named_the_best_weights(tmp_path: Path) -> None:
    """A trainer that goes on does not evaluate again what was reported, so it must not be killed between the two."""
    outcome = Scored(reward=1, termination=Termination.COMPLETED)
    played = [PlayedGroup(Group("e003-t", 3, Phase.EVAL, "t", "h", 1), [Rollout("e003-t-0", 0, outcome, [], 0, 1)])]
    trainer: Any = LegoSync.__new__(LegoSync)  # what an evaluation needs of it; the rest wants Ray
    trainer.agent_loop_manager = SimpleNamespace(evaluate=lambda step: played, reporter=Dying())
    trainer.global_steps, trainer._run = 3, RunDir(tmp_path)
    trainer._spec = RunSpec(model=Model(path="m"), harnesses=[Harness(name="h", version="1")], data=Data(family="onebug"))
    weights(trainer._run, 3).mkdir(parents=True)
    with pytest.raises(Killed):
        trainer._validate()
    assert read_best(trainer._run) == BestFile(step=3, resolved=1, total=1)
