"""JSON values from outside: how deep they go, and whether their text can be written as UTF-8."""

from __future__ import annotations

from typing import Any


def deeper(value: Any, depth: int) -> bool:
    """Whether containers are nested more than `depth` times. Never recurses."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]  # fmt: skip
        if not level:
            return False
    return True


def encodable(value: Any) -> Any:
    """The value with U+FFFD for lone surrogates, which JSON can spell and no file or tokenizer takes. Recurses, so check `deeper` first."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return value
