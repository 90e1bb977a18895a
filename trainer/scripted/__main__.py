"""`python -m trainer.scripted`: one rollout at the real proxy with a scripted policy; see `server/schemas/scripted.py` for the lines."""

from __future__ import annotations

import asyncio
import sys

from server.schemas.scripted import ScriptedEnd, ScriptedOrder, ScriptedReady
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.vocabulary import byte_level

from .engine import ScriptedEngine


async def serve(order: ScriptedOrder) -> None:
    """Until a further line, or the end, of standard input."""
    tokenizer = byte_level()
    engine, rendering = ScriptedEngine(tokenizer, order.voices), Rendering(tokenizer)
    proxy = Proxy(engine, rendering)
    await proxy.start()
    try:
        sampling = Sampling(temperature=1.0, max_tokens=order.max_tokens, stop_token_ids=rendering.stop_token_ids)
        given = order.limits
        limits = Limits(given.max_turns, order.context, given.prompt_budget, given.response_budget, given.token_budget)
        url = await proxy.open(order.rollout_id, order.key.get_secret_value(), sampling, limits, order.harness)
        print(ScriptedReady(url=url).model_dump_json(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        capture = await proxy.close(order.rollout_id)
        end = ScriptedEnd(
            record=capture.record(order.rollout_id),
            spoken=engine.spoken,
            turn_cap_hit=capture.turn_cap_hit,
            over_length=capture.over_length,
            error=capture.engine_error or capture.proxy_error or "",
        )
        print(end.model_dump_json(), flush=True)
    finally:
        await proxy.stop()


if __name__ == "__main__":
    asyncio.run(serve(ScriptedOrder.model_validate_json(sys.stdin.readline())))
