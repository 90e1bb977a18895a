"""Prompt blocks: the text that two captured requests of a harness share, found automatically.

A block becomes one token of the demo policy's vocabulary. The tokenizer stays lossless, so token capture and log-probs are exact; only the
length of the harness's boilerplate disappears. Whatever differs between the two requests (task, machine, date, folder) stays outside.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence


def shared_blocks(first: str, second: str, specials: Sequence[str], min_length: int = 8) -> list[str]:
    """Texts that both rendered prompts contain in the same order, cut at every special token; longest first.

    Raises ValueError when the prompts do not have the same special tokens, that is not the same messages.
    """
    cut = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
    a, b = cut.split(first), cut.split(second)
    if a[1::2] != b[1::2]:
        raise ValueError("the two probe requests differ in their message structure: record both with the same harness version and flags")
    found = {block for x, y in zip(a[::2], b[::2], strict=True) for block in _segment(x, y) if len(block) >= min_length}
    return sorted(found, key=lambda block: (-len(block), block))


def _segment(first: str, second: str) -> Iterable[str]:
    """Shared runs of whole lines, from the line break before them up to a label such as `Solve this: ` that both next lines begin with."""
    x, y = first.splitlines(keepends=True), second.splitlines(keepends=True)
    for i, j, size in difflib.SequenceMatcher(None, x, y, autojunk=False).get_matching_blocks():
        block = "".join(x[i : i + size])
        if i and j and x[i - 1].endswith("\n") and y[j - 1].endswith("\n"):
            block = "\n" + block
        if i + size < len(x) and j + size < len(y):
            pairs = zip(x[i + size], y[j + size], strict=False)
            same = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            block += same[: same.rfind(": ") + 2] if ": " in same else ""
        yield block
