"""Reading untrusted bodies: every accessor names the field in its error. Also the normal form that all dialects share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.capture.message import Message
from trainer.capture.values import deeper, encodable
from trainer.proxy.limits import MAX_NAME
from trainer.proxy.refusal import Reason, Refusal

MAX_DEPTH = 64
MAX_ITEMS = 20_000
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class TooDeep(ValueError):
    """Nested deeper than allowed."""


def wrong(where: str, expected: str) -> Refusal:
    return Refusal(Reason.BAD_REQUEST, f"{where} must be {expected}")


def an_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, "an object")
    return value


def a_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise wrong(where, f"a list of at most {MAX_ITEMS} items")
    return value


def a_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, "a string")
    return value


def a_name(value: Any, where: str) -> str:
    if len(name := a_string(value, where)) > MAX_NAME:
        raise wrong(where, f"a string of at most {MAX_NAME} characters")
    return name


def a_count(value: Any, where: str) -> int | None:
    """A positive integer, or None when the field is absent."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(where, "a positive integer")
    return value


def header(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of several headers that is there, else ""."""
    return next((headers[name] for name in names if name in headers), "")


def load(raw: bytes) -> Any:
    """Parse a body. Raises Refusal for anything that is no JSON of bounded depth; lone surrogates become U+FFFD."""
    try:
        return parse(raw, MAX_DEPTH)
    except TooDeep:
        raise Refusal(Reason.BAD_REQUEST, f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(Reason.BAD_REQUEST, f"the body is not valid JSON: {str(error)[:200]}") from None


def parse(raw: bytes, depth: int) -> Any:
    """JSON of at most `depth` nested containers. Raises ValueError (TooDeep is one) and RecursionError."""
    value = json.loads(raw.decode("utf-8-sig"))  # given bytes, json lets encoded surrogates pass, which nothing behind here can encode
    if deeper(value, depth):
        raise TooDeep
    return encodable(value) if b"\\ud" in raw or b"\\uD" in raw else value


def arguments(text: str) -> Any:
    """Re-sent arguments as a value when they are a JSON object, else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or deeper(value, MAX_DEPTH):
        return text
    return encodable(value) if "\\ud" in text or "\\uD" in text else value


def fold_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """One system message in front; a later one becomes a reminder beside the user message that it follows.

    Claude Code 2.1 puts role=system inside the list, which chat templates reject. Moving it to the front would rewrite the prefix of
    every earlier call.
    """
    folded: list[Message] = []
    for message in messages:
        last = folded[-1] if folded else None
        if message.role != "system" or last is None:
            folded.append(message)
        elif last.role == "system":
            folded[-1] = Message("system", join([last.content, message.content]))
        else:
            text = message.content if message.content.startswith("<system-reminder>") else REMINDER.format(message.content)
            if last.role == "user":
                folded[-1] = Message("user", join([last.content, text]))
            else:
                folded.append(Message("user", text))
    return tuple(folded)


def join(texts: Iterable[str]) -> str:
    """Text blocks as one string. A single block equals the plain string, because harnesses switch between the two forms."""
    return "\n".join(texts)


def sse(data: Any, event: str = "") -> str:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"
