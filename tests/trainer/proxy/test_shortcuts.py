"""What makes rendering faster changes no token: texts that are stood in for, and turns whose ordinary tokens are left out."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from server.schemas.runspec import Family
from trainer.capture.message import Message, ToolCall
from trainer.proxy import rendering
from trainer.proxy.rendering import Rendered, Rendering
from trainer.vocabulary import SPECIALS, VISION, byte_level

TOKENIZER = byte_level(control=VISION)
RENDERINGS = {
    (family, thinking): Rendering(TOKENIZER, family=family, thinking=thinking) for family in get_args(Family) for thinking in (0, 1)
}
TEXT = st.builds(
    lambda pieces, times: "".join(pieces) * times, st.lists(st.sampled_from([*SPECIALS, "a b", "\n", "é", "<", "{"])), st.integers(1, 40)
)
SAMPLED = st.lists(st.sampled_from([TOKENIZER.token_to_id(name) for name in SPECIALS]) | st.integers(0, 255), max_size=60)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=4)


def both(made: Rendering, sampled: list[int], said: list[tuple[str, str]]) -> tuple[Rendered, Rendered | None]:
    start = [Message("system", "You fix code."), Message("user", "Fix it.")]
    new = [Message(role, text, tool_call_id="a" if role == "tool" else "") for role, text in said]  # type: ignore[arg-type]
    prompt = made.render(start, [])
    turn = Message("assistant", said[0][1], (ToolCall("a", "bash", {"command": said[0][1]}),), reasoning=said[0][1])
    return made._render([*start, turn, *new], []), made.bridge(prompt.ids[prompt.ends[-1] :], sampled, new, [])


@pytest.mark.parametrize("kind", RENDERINGS, ids=str)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampled=SAMPLED, said=MESSAGES)
@example(sampled=[TOKENIZER.token_to_id("<|endoftext|>")] * 16 + [0], said=[("user", "")])  # an end, and an ordinary token behind it
def test_a_shortcut_gives_the_same_ids(kind: tuple[Family, int], sampled: list[int], said: list[tuple[str, str]]) -> None:
    quick = both(RENDERINGS[kind], sampled, said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "SHORT", 1 << 30)
        patch.setattr(rendering, "BEGINNING", 1 << 30)
        assert quick == both(RENDERINGS[kind], sampled, said)
