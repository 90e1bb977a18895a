"""Reading the bodies of one rollout. A harness sends its whole conversation with every call, and little of it is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trainer.proxy.dialects.fields import MAX_DEPTH, load, parse

LISTS = frozenset({"messages", "input"})
"""Fields whose items are kept one by one."""
KEPT_BYTES = 2 * 1024 * 1024
MOST_BYTES = 8 * 1024 * 1024
"""A body that is longer than any conversation is read and let go, so that a rollout cannot hold memory by having sent it."""
SMALL = 200
"""A field shorter than this is parsed faster than it is looked up."""


class Part:
    """A JSON value as it stands in some body, and what dialects made of it."""

    __slots__ = ("made", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.made: dict[Callable[[Any, str], Any], Any] = {}


class Body(dict[str, Any]):
    """A parsed body. Its items are shared with earlier and later bodies, so nobody may change them."""

    __slots__ = ("made", "parts")

    def __init__(self, fields: dict[str, Any], parts: dict[int, Part], made: dict[Callable[[Any, str], Any], list[Any]]) -> None:
        """`made` are lists of what dialects made of the items of the body that this one goes on from."""
        super().__init__(fields)
        self.parts, self.made = parts, made


class Reader:
    """Parses nothing twice. A body that is the one before with more items at the end of its list costs what the new items cost; else what
    is byte for byte as it was in an earlier body is the value that was read then. The outcome is that of `load`, which also reads every
    body that the quick ways refuse, and words the errors."""

    def __init__(self) -> None:
        self._known: dict[bytes, Part] = {}
        self._parts: dict[int, Part] = {}
        self.held = 0
        """Bytes of the parts that are kept."""
        self._grew: tuple[bytes, int] = b"", 0
        """The last body and where its list ends, until `settle`."""
        self._object = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._list = msgspec.json.Decoder(list[msgspec.Raw])
        self._forget()

    def load(self, raw: bytes) -> Any:
        """The body, a `Body` when it is an object. Raises Refusal as `fields.load` does."""
        self.settle()
        if self.held > len(raw) + KEPT_BYTES:
            self._forget()
        try:
            body = self._grown(raw) or self._anew(raw)
        except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors
            return load(raw)
        if max(self.held, len(raw)) > MOST_BYTES:
            self._forget()
        return body

    def settle(self) -> None:
        """Copy what the next body is compared with. It is left for after the call, which would have to wait for it."""
        raw, end = self._grew
        if raw:
            self._head, self._grew = raw[:end], (b"", 0)

    def _forget(self) -> None:
        self._grew = b"", 0
        self._known, self._parts, self.held = {}, {}, 0
        self._head = self._tail = b""
        self._name, self._body = "", Body({}, {}, {})

    def _grown(self, raw: bytes) -> Body | None:
        """By the bytes up to the end of the list in the last body, and from there on: JSON with more items between them is the last body
        with more items."""
        head, tail = self._head, self._tail
        if not (head and len(raw) > len(head) + len(tail) and raw.startswith(head) and raw.endswith(tail)):
            return None
        end = len(raw) - len(tail)
        new = raw[len(head) : end]
        if not new.startswith(b","):
            return None
        last = self._body
        if not (items := self._items(b"[" + new[1:] + b"]")):
            return None
        self._grew, self._body = (raw, end), Body({**last, self._name: last[self._name] + items}, self._parts, last.made)
        return self._body

    def _anew(self, raw: bytes) -> Body:
        fields = {name: bytes(value) for name, value in self._object.decode(raw).items()}
        body = Body({name: self._field(name, value) for name, value in fields.items()}, self._parts, {})
        self._head = b""
        lists = [name for name in LISTS & fields.keys() if isinstance(body[name], list) and body[name]]
        if len(lists) == 1 and raw.count(text := fields[lists[0]]) == 1:  # else its place is not known
            end = raw.index(text) + len(text) - 1
            self._head, self._tail, self._name, self._body = raw[:end], raw[end:], lists[0], body
        return body

    def _field(self, name: str, raw: bytes) -> Any:
        if name in LISTS and raw.startswith(b"["):
            return self._items(raw)
        return parse(raw, MAX_DEPTH - 1) if len(raw) < SMALL else self._part(raw, MAX_DEPTH - 1)

    def _items(self, raw: bytes) -> list[Any]:
        return [self._part(bytes(item), MAX_DEPTH - 2) for item in self._list.decode(raw)]

    def _part(self, raw: bytes, depth: int) -> Any:
        part = self._known.get(raw)
        if part is None:
            part = self._known[raw] = Part(parse(raw, depth))
            self._parts[id(part.value)] = part
            self.held += len(raw)
        return part.value


def read[T](body: dict[str, Any], make: Callable[[Any, str], T], value: Any, where: str) -> T:
    """`make(value, where)`, made once for each value of a `Body`. `make` must depend on the value alone; `where` is for its errors."""
    part = body.parts.get(id(value)) if isinstance(body, Body) else None
    if part is None:  # a part keeps its value alive, so no other object has its id
        return make(value, where)
    if make not in part.made:
        part.made[make] = make(value, where)
    made: T = part.made[make]
    return made


def read_all[T](body: dict[str, Any], make: Callable[[Any, str], T], items: list[Any], where: str) -> list[T]:
    """`read` of every item of the list that a `Body` grows by."""
    made: list[T] = body.made.setdefault(make, []) if isinstance(body, Body) else []
    made += [read(body, make, items[i], f"{where}[{i}]") for i in range(len(made), len(items))]
    return made[: len(items)]
