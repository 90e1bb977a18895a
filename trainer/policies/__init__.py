"""Demo policies: tiny Qwen3-MoE models that ship with the program, and the code that makes them."""

from __future__ import annotations

from pathlib import Path

PREFIX = "builtin:"


def resolve(name: str) -> Path:
    """Directory of the weights named `builtin:NAME`. Raises ValueError when nothing of that name ships."""
    here = Path(__file__).parent
    shipped = sorted(path.parent.name for path in here.glob("*/model.safetensors"))
    if name.removeprefix(PREFIX) not in shipped:
        raise ValueError(f"no policy {name!r} ships; there are: {', '.join(PREFIX + each for each in shipped)}")
    return here / name.removeprefix(PREFIX)
