"""An engine whose policy is a script, over a tokenizer in which every byte is a token: nothing is downloaded and nothing is sampled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from server.schemas.scripted import ScriptedTurn, Voice
from trainer.engine.base import EngineError, Generation, GenerationRequest, StopReason


class ScriptedEngine:
    """Answers each call with the next turn of the voice that its prompt belongs to."""

    def __init__(self, tokenizer: Tokenizer, voices: Sequence[Voice]) -> None:
        self._tokenizer, self._voices = tokenizer, voices
        self.spoken: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt = self._tokenizer.decode(np.asarray(request.prompt_ids).tolist(), skip_special_tokens=False)
        voice = next((v for v in self._voices if all(s in prompt for s in v.says) and not any(u in prompt for u in v.unless)), None)
        if voice is None:
            raise EngineError(f"no voice of the script fits this call; its prompt ends {prompt[-300:]!r}")
        turn = voice.turns[min(self.spoken[voice.name], len(voice.turns) - 1)]
        self.spoken[voice.name] += 1
        ids = self._tokenizer.encode(sampled_text(turn), add_special_tokens=False).ids
        stop: StopReason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        log_probs = [-0.1] * len(ids)
        if request.on_tokens is not None:
            request.on_tokens(ids, log_probs)
        return Generation(ids, log_probs, None, stop, 0)


def sampled_text(turn: ScriptedTurn) -> str:
    """The turn as Qwen3 writes it, with its end token."""
    blocks = [f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in turn.calls]
    return "\n".join([*([turn.text] if turn.text else []), *blocks]) + "<|im_end|>"
