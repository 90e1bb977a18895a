"""How fake harnesses play the trials of real runs: what the policy says is captured, what it earns is made up."""

from __future__ import annotations

from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.trials import TrialRequest

from .fake_runner import Harness, scored


async def two_turns(client: Harness, request: TrialRequest) -> Scored | Failed:
    """Odd samples succeed."""
    messages = [{"role": "user", "content": f"repair {request.task}"}]
    for _ in range(2):
        reply = await client.chat(messages)
        assert reply is not None
        messages += [reply, {"role": "user", "content": "go on"}]
    return scored(int(request.trial_id.rsplit("-", 1)[1]) % 2)


async def mixed(client: Harness, request: TrialRequest) -> Scored | Failed:
    """Nobody solves task 0; of task 1 a sandbox cannot start; task 2 has a compaction. Odd samples of tasks 1 and 2 succeed."""
    task, sample = int(request.task[-1]), int(request.trial_id.rsplit("-", 1)[1])
    if request.split == "train" and task == 1 and sample == 3:
        return Failed(stage=Stage.SANDBOX_SETUP, cause=Cause.SANDBOX_SETUP, detail="no space left on device")
    messages = [{"role": "user", "content": f"repair {request.task}"}]
    for turn in range(2):
        reply = await client.chat(messages)
        assert reply is not None
        if task == 2 and sample == 1 and turn == 0:
            messages = [{"role": "user", "content": "summary of what happened so far"}]
        else:
            messages += [reply, {"role": "user", "content": "go on"}]
    return scored(task != 0 and sample % 2)
