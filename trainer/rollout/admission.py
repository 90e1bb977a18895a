"""The trainer's half of the admission table: the runner's outcome and what the capture saw → the final outcome.

The runner knows how the process ended and what the grader said; only the capture knows whether the policy was cut off and whether it
was asked at all. Turn cap and overflow are decided here, before any exit code counts.
"""

from __future__ import annotations

from typing import Protocol

from server.schemas.outcome import ADMISSION, Cause, Failed, Scored, Stage, Termination


class CaptureFacts(Protocol):
    @property
    def policy_turns(self) -> int: ...
    @property
    def turn_cap_hit(self) -> bool: ...
    @property
    def over_length(self) -> bool: ...
    @property
    def engine_error(self) -> str | None: ...
    @property
    def proxy_error(self) -> str | None: ...


def admit(outcome: Scored | Failed, facts: CaptureFacts) -> Scored | Failed:
    """The final outcome of one trial.

    A failure of engine or proxy outweighs everything: what the harness did after it says nothing about the policy. A trial without a
    model call says nothing either, whether its process ended or hung. Turn cap and overflow say why the agent stopped, also where its
    sandbox or exit code shows a fault of its own. `tampered` stays.
    """
    if facts.engine_error:
        return Failed(stage=Stage.AGENT, cause=Cause.ENGINE, detail=facts.engine_error)
    if facts.proxy_error:
        return Failed(stage=Stage.AGENT, cause=Cause.PROXY, detail=facts.proxy_error)
    reached_agent = isinstance(outcome, Scored) or outcome.cause is Cause.AGENT_TIMEOUT
    if reached_agent and facts.policy_turns == 0:
        evidence = outcome.evidence if isinstance(outcome, Failed) else []
        detail = f"the harness made no model call ({outcome.detail})" if outcome.detail else "the harness made no model call"
        return Failed(stage=Stage.AGENT, cause=Cause.HARNESS_NEVER_CALLED, detail=detail, evidence=evidence)
    if isinstance(outcome, Scored) and outcome.termination is not Termination.TAMPERED:
        if facts.over_length:
            return outcome.model_copy(update={"termination": Termination.OVER_LENGTH})
        if facts.turn_cap_hit:
            return outcome.model_copy(update={"termination": Termination.MAX_TURNS})
    return outcome


def plays_again(outcome: Scored | Failed, attempts: int) -> bool:
    """Whether the trainer starts a new trial in place of one that ended like this, after `attempts` of them.

    Set-up stages were already tried again by the runner, which knows that no model was called. What the table retries beyond that is a
    grader that could not run: nothing that the policy did made it fail, so a fresh rollout in its place is a fair sample.
    """
    grader = (Cause.VERIFIER, Cause.VERIFIER_TIMEOUT)
    return isinstance(outcome, Failed) and outcome.cause in grader and attempts <= ADMISSION[outcome.cause].retries
