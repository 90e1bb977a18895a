"""The verdict channel: only one whole answer is a pass, and blame is ours only before graded code ran."""

from hypothesis import given
from hypothesis import strategies as st

from sandbox.integrity.verdict import Grade, read_verdict

NONCE = b"0123456789abcdef"


def grade(output: bytes, exit_code: int | None = 0, changed: int = 1) -> Grade:
    return read_verdict(output, exit_code, NONCE, changed, "").grade


def test_whole_answers() -> None:
    assert grade(b"ready\npassed " + NONCE + b"\n") is Grade.PASSED
    assert grade(b"ready\nfailed\n") is Grade.FAILED
    assert grade(b"ready\nopaque\n") is Grade.OPAQUE
    assert grade(b"unusable file name too long") is Grade.UNUSABLE


def test_a_pass_needs_the_nonce_the_exit_status_and_nothing_else() -> None:
    passed = b"ready\npassed " + NONCE + b"\n"
    assert grade(passed, exit_code=1) is Grade.TAMPERED
    assert grade(passed, exit_code=-9) is Grade.TAMPERED
    assert grade(passed + b"x") is Grade.TAMPERED
    assert grade(b"ready\npassed 0000000000000000\n") is Grade.TAMPERED
    assert grade(b"ready\nready\npassed " + NONCE + b"\n") is Grade.TAMPERED


def test_who_is_to_blame() -> None:
    assert grade(b"", exit_code=127) is Grade.NOT_RUN
    assert grade(b"", exit_code=None) is Grade.TIMEOUT
    assert grade(b"ready\n", exit_code=-9) is Grade.TAMPERED
    assert grade(b"ready\n", exit_code=None) is Grade.TAMPERED
    assert grade(b"ready\n", exit_code=None, changed=0) is Grade.TIMEOUT
    assert grade(b"ready\n", exit_code=-9, changed=0) is Grade.NOT_RUN


def test_a_kill_is_told_apart_and_is_never_a_pass() -> None:
    killed = read_verdict(b"ready\nkilled\n", 0, NONCE, 1, "")
    assert (killed.grade, killed.killed) == (Grade.FAILED, True)
    assert grade(b"ready\nkilled\n", changed=0) is Grade.NOT_RUN
    assert read_verdict(b"ready\n", -9, NONCE, 1, "").killed
    assert not read_verdict(b"ready\n", None, NONCE, 1, "").killed
    assert not read_verdict(b"ready\nfailed\n", 0, NONCE, 1, "").killed


@given(st.binary(max_size=60), st.sampled_from([0, 1, -9, None]))
def test_no_output_without_the_nonce_passes(output: bytes, exit_code: int | None) -> None:
    assert grade(output, exit_code) is not Grade.PASSED
    assert grade(b"ready\npassed " + output, exit_code) is not Grade.PASSED
