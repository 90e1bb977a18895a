"""The policy's chat template and parser, tried with synthetic turns. Loads no weights and imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from server.schemas.probes import TRAINED_WITH, ModelFacts, TemplateClass, TrainedWith
from server.schemas.runspec import RunSpec
from trainer import policies
from trainer.capture.message import Message, ToolCall
from trainer.launch.preflight import experts, language_config
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.rendering import Rendering, Tools

TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
GOLDEN = ({"command": "sed -i 's|a < b|a \\\\> b|' f.py && echo \"x\\n\" 'é'"}, {"command": "ls", "timeout": 3, "flags": [True, None, 0.5]})
"""Arguments with quotes, escapes, markup, non-ASCII text and every JSON type."""
DIALECTS: dict[str, type[Dialect]] = {"openai": OpenAIChat, "anthropic": Anthropic, "responses": OpenAIResponses}
PROBES = Path(policies.__file__).parent / "probes"


def model_facts(spec: RunSpec) -> ModelFacts:
    """Never raises for a broken policy: that is a fact."""
    try:
        directory = policies.resolve(spec.model.path) if spec.model.path.startswith(policies.PREFIX) else Path(spec.model.path)
        config = language_config(directory)
        rendering = Rendering.load(directory, family=spec.model.renderer, thinking=spec.model.thinking)
        trained = directory / TRAINED_WITH
        trained_with = TrainedWith.model_validate_json(trained.read_bytes()) if trained.exists() else None
    except FileNotFoundError as error:
        return ModelFacts(problem=f"{error.filename or error} is missing" if error.filename else str(error))
    except AssertionError as error:
        return ModelFacts(problem=f"the tokenizer does not fit the {spec.model.renderer} renderer: {error or 'a special token is missing'}")
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises a bare Exception for a file that it cannot read
        return ModelFacts(problem=str(error))
    return ModelFacts(
        directory=str(directory),
        experts=experts(config),
        layers=int(config.get("num_hidden_layers") or 0),
        top_k=int(config.get("num_experts_per_tok") or 0),
        longest=config.get("max_position_embeddings"),
        template=template_class(rendering, thinking=spec.model.thinking),
        round_trip=round_trip(rendering),
        junction=junction(rendering),
        trained_with=trained_with,
        prompt_tokens={harness.name: n for harness in spec.harnesses if (n := prompt_tokens(rendering, harness.name)) is not None},
    )


def template_class(rendering: Rendering, *, thinking: bool) -> TemplateClass:
    """Three turns: after the task, after a tool's answer, after a second question."""
    reasoning = "Look first." if thinking else None
    conversation = (
        Message("system", "You repair programs."),
        Message("user", "Repair a.py."),
        Message("assistant", "Let me look.", (ToolCall("c1", "bash", GOLDEN[0]),), reasoning=reasoning),
        Message("tool", "a = 1", tool_call_id="c1"),
        Message("assistant", "It is repaired.", reasoning=reasoning),
        Message("user", "Is it?"),
        Message("assistant", "Yes.", reasoning=reasoning),
    )
    turns = [n for n, message in enumerate(conversation) if message.role == "assistant"]
    found = TemplateClass.APPEND_ONLY
    for turn, following in pairwise(turns):
        prompt = rendering.render(conversation[:turn], TOOLS).ids
        sampled = _ids_until(rendering, conversation[: turn + 1], turn)
        kept = _ids_until(rendering, conversation[:following], turn)
        if kept == sampled and kept[: len(prompt)] == prompt:
            continue
        longest = sampled if sampled[: len(prompt)] == prompt else prompt + sampled
        if not _is_subsequence(kept, longest):
            return TemplateClass.REWRITES
        found = TemplateClass.STRIPS
    return found


def round_trip(rendering: Rendering) -> str:
    """Empty when one call and two calls in a turn come back from the parser as they went into the renderer, else what became of them."""
    opening = (Message("system", "You repair programs."), Message("user", "Repair a.py."))
    prompt = rendering.render(opening, TOOLS)
    generation_prompt = prompt.ids[prompt.ends[-1] :]
    for arguments in ((GOLDEN[0],), GOLDEN):
        calls = tuple(ToolCall(f"c{n}", "bash", value) for n, value in enumerate(arguments))
        ids = _ids_until(rendering, (*opening, Message("assistant", "", calls)), len(opening))
        parsed = rendering.parse(generation_prompt, ids[len(prompt.ids) :], TOOLS)
        back = [(call.name, call.arguments) for call in parsed.calls]
        if parsed.malformed or back != [("bash", value) for value in arguments]:
            return f"{len(arguments)} call(s) came back as {back!r}, {parsed.malformed} malformed"[:500]
    return ""


def junction(rendering: Rendering) -> list[int]:
    """What stands between a turn and the next user message, measured: what bridges to two different messages begin with alike. Empty when
    a whole render has something else there, which would put other ids into training than the deployed template into a prompt."""
    opening = (Message("system", "You repair programs."), Message("user", "Repair a.py."))
    turn, prompt = Message("assistant", "It is repaired."), rendering.render(opening, TOOLS)
    sampled = _sampled(rendering, _ids_until(rendering, (*opening, turn), len(opening))[len(prompt.ids) :])
    after = []
    for sentinel in ("Alpha", "omega"):
        bridged = rendering.bridge(prompt.ids[prompt.ends[-1] :], sampled, [Message("user", sentinel)], TOOLS)
        whole = rendering.render((*opening, turn, Message("user", sentinel)), TOOLS)
        if bridged is None or whole.ids != prompt.ids + sampled + bridged.ids:
            return []
        after.append(bridged.ids)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*after, strict=False))]


def _sampled(rendering: Rendering, ids: list[int]) -> list[int]:
    """Up to the stop token: the policy samples nothing of what the template puts behind it."""
    return ids[: next(i for i, token in enumerate(ids) if token in rendering.stop_token_ids) + 1]


def prompt_tokens(rendering: Rendering, harness: str) -> int | None:
    """Length of the harness's recorded first request; None when none is recorded."""
    file = PROBES / f"{harness}-a.json"
    if not file.is_file():
        return None
    recorded = json.loads(file.read_bytes())
    request = DIALECTS[recorded["dialect"]]().parse(recorded["request"], {})
    return len(rendering.render(request.messages, request.tools).ids)


def _ids_until(rendering: Rendering, messages: Sequence[Message], last: int) -> list[int]:
    rendered = rendering.render(messages, TOOLS)
    return rendered.ids[: rendered.ends[last]]


def _is_subsequence(short: Sequence[int], long: Sequence[int]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)
