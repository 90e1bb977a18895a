from server.schemas.states import RUN_TRANSITIONS, TERMINAL_RUN_STATES, TERMINAL_TRIAL_STATES, TRIAL_TRANSITIONS, RunState, TrialState


def test_tables_cover_every_state_and_lead_only_to_states() -> None:
    assert set(RUN_TRANSITIONS) == set(RunState)
    assert set(TRIAL_TRANSITIONS) == set(TrialState)


def test_terminal_states() -> None:
    assert {RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED} == TERMINAL_RUN_STATES
    assert {TrialState.SCORED, TrialState.FAILED} == TERMINAL_TRIAL_STATES


def test_every_live_run_state_can_end() -> None:
    for state in set(RunState) - TERMINAL_RUN_STATES:
        assert RUN_TRANSITIONS[state] & TERMINAL_RUN_STATES


def test_a_run_that_never_trained_cannot_succeed() -> None:
    assert RunState.SUCCEEDED not in RUN_TRANSITIONS[RunState.CREATED] | RUN_TRANSITIONS[RunState.STARTING]
