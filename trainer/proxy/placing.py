"""Where a request hangs in the capture graph, and which ids its messages become."""

from __future__ import annotations

from collections.abc import Sequence

from server.schemas.runspec import History
from trainer.capture.graph import Graph, Place
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.proxy.rendering import Rendering


def place(graph: Graph, rendering: Rendering, request: Request) -> Place:
    """Render what is new behind the longest known path; a path that cannot be extended exactly is left for a new branch."""
    match = graph.locate(request)
    graph.returned(request, match)
    new = request.messages[match.position :]
    own = next((i for i, message in enumerate(new) if message.role == "assistant"), len(new))
    if match.turn is not None and own:
        scaffold, sampled = match.turn.ids[: match.turn.scaffold].tolist(), match.turn.sampled.tolist()
        bridged = rendering.bridge(scaffold, sampled, new[:own], request.tools)
        if bridged is not None and own == len(new):
            return graph.place(request, bridged.ids, bridged.ends, match)
        if bridged is not None and rendering.history is History.KEEP:
            spliced = rendering.splice(bridged, _as_sampled(graph, request.messages), request.tools, match.position)
            return graph.place(request, spliced.ids, spliced.ends, match)
    rendered = rendering.render(_as_sampled(graph, request.messages), request.tools)
    return graph.place(request, rendered.ids, rendered.ends, None)


def _as_sampled(graph: Graph, messages: Sequence[Message]) -> list[Message]:
    """With the policy's own words where the harness sends a whole turn back in another context: it may have edited them."""
    turns = (graph.echoed(message) for message in messages)
    return [message if turn is None else turn.message for message, turn in zip(messages, turns, strict=True)]
