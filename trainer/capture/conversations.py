"""Which conversation each turn of a rollout belongs to, and for what: read from the finished graph, where it shows what became of an
answer.

Conversations are told apart by the harness's own thread headers; where there are none, by system prompt, tools and shared turns. A side
call belongs to the conversation that it serves, but never continues it. What the request says about itself the dialects have read
(`Request.kind_hint`); here it is told by shape and by what the harness did with the answer:

* a call without tools in a thread that has tools is no turn: a summary when it carries the history (Codex, qwen-code as messages,
  OpenCode as one flat text), else auxiliary (titles);
* a call whose text is quoted where the history used to be was a summary (every harness that compacts), and so was one whose text the
  request for that summary quotes (Terminus 2 has its summary questioned, and the questions answered);
* a call with a system prompt and tools of its own that reads another conversation's turns is auxiliary (qwen-code's memory agent).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from server.schemas.capture import BranchClass
from trainer.capture.graph import Node, Turn
from trainer.capture.message import Key

SUMMARY = ("<summary>", "</summary>")
"""Claude Code keeps only what stands between them."""
TELLING = 16
"""Characters from which on a text is no coincidence."""
RECENT = 8
"""Turns whose texts are looked for in a flat text: one that holds the history holds its end."""
SIDE = (BranchClass.SUMMARY, BranchClass.AUXILIARY)


@dataclass(eq=False)
class Reading:
    """One turn with what its context says. `nodes` are the messages before it."""

    turn: Turn
    nodes: list[Node]
    tail: list[Node]
    """The nodes behind `before`."""
    before: Reading | None
    """The last sampled turn among the nodes."""
    turns: tuple[Turn, ...]
    """Sampled turns that are in the context: in place, or as a message with their calls."""
    conversation: int = -1
    branch_class: BranchClass = BranchClass.POLICY
    summary: Reading | None = None
    """The side call whose answer took the place of this turn's history, or was added to it."""
    followed: int = -1
    """The last turn that goes on from this one."""
    grows: bool = field(init=False)
    """The first to go on from `before`."""

    def __post_init__(self) -> None:
        self.grows = self.extends and self.before is not None and not self.before.continued
        if self.before is not None and self.extends:
            self.before.followed = self.turn.index

    @property
    def continued(self) -> bool:
        return self.followed >= 0

    @property
    def extends(self) -> bool:
        """Behind `before` there is only what the harness said itself."""
        return self.before is not None and all(node.message.role != "assistant" for node in self.tail)

    @cached_property
    def echoed(self) -> frozenset[int]:
        return frozenset(turn.index for turn in self.turns)

    @property
    def group(self) -> tuple[int, BranchClass]:
        """Turns of one group can continue each other."""
        return self.conversation, self.branch_class

    @property
    def results(self) -> list[str]:
        """What tools answered to the turn before."""
        return [node.message.content for node in self.tail if node.message.role == "tool"]

    @property
    def opening(self) -> tuple[str, bytes]:
        """System prompt and tools."""
        first = self.nodes[0].message
        return first.content if first.role == "system" else "", self.turn.tools

    def starts_like(self, other: Reading) -> bool:
        return [node.message.key for node in self.nodes[: len(other.nodes)]] == [node.message.key for node in other.nodes]

    def holds(self, turn: Turn) -> bool:
        """In place or as a message; texts have no id and are known by their words."""
        return turn.index in self.echoed or turn.message.key in self._keys

    def quoted_in(self, nodes: Sequence[Node], *, alone: bool = True) -> bool:
        """A user message there holds the words of this turn, and (`alone`) not of the turn before it too, as a flat history would."""
        text = self.turn.message.content.strip()
        if len(text) < TELLING or self.turn.message.tool_calls:
            return False
        quoting = [node for node in nodes if node.message.role == "user" and text in node.message.content]
        flat = alone and self.before is not None and self.before.quoted_in(quoting, alone=False)
        return bool(quoting) and not flat

    @cached_property
    def _keys(self) -> frozenset[Key]:
        return frozenset(node.message.key for node in self.nodes)

    def says(self, text: str, *, assistants: bool) -> bool:
        return any(text in node.message.content for node in self.nodes if assistants or node.message.role != "assistant")


def read(turns: Sequence[Turn]) -> list[Reading]:
    """A reading per turn, in order."""
    readings = list(_contexts(turns))
    for i, reading in enumerate(readings):
        reading.summary = _added_to(reading, readings[i - 1]) if reading.grows else _replaced_by(reading, readings[:i])
    proven = {id(step) for reading in readings if reading.summary for step in _steps(reading, reading.summary, readings)}
    with_tools = {turn.thread for turn in turns if turn.tools}
    for i, reading in enumerate(readings):
        _assign(reading, readings[:i], summary=id(reading) in proven, with_tools=reading.turn.thread in with_tools)
    return readings


def _contexts(turns: Sequence[Turn]) -> Iterator[Reading]:
    by_turn = dict[int, Reading]()
    by_call = {call.id: turn for turn in turns for call in turn.message.tool_calls}
    for turn in turns:
        tail, node = list[Node](), turn.parent
        while node is not None and node.parent is not None and not isinstance(node, Turn):
            tail.append(node)
            node = node.parent
        tail.reverse()
        quoted = (found for node in tail if (found := _by_call(node, by_call)) is not None)
        before = by_turn[id(node)] if isinstance(node, Turn) else None
        if before is None:
            reading = Reading(turn, tail, tail, None, tuple(quoted))
        else:
            reading = Reading(turn, [*before.nodes, before.turn, *tail], tail, before, (*before.turns, before.turn, *quoted))
        by_turn[id(turn)] = reading
        yield reading


def _by_call(node: Node, turns: Mapping[str, Turn]) -> Turn | None:
    """Part of a turn is enough to know whose it is."""
    return next((turns[call.id] for call in node.message.tool_calls if call.id in turns), None)


def _replaced_by(reading: Reading, earlier: Sequence[Reading]) -> Reading | None:
    """The call just before, in the same thread, whose text is quoted where the history used to be.

    A sub-agent's report is quoted too, and may come between; a summary is asked for without tools, or in its place.
    """
    thread = (other for other in reversed(earlier) if other.turn.thread == reading.turn.thread)
    asked = (other for other in thread if other.opening == reading.opening or not other.turn.tools)
    last = next((other for other in asked if other.turn.side is not BranchClass.AUXILIARY), None)
    if last is None or last.turn.message.tool_calls or last.continued or last.turn.index in reading.echoed:
        return None
    if not last.turn.tools and last.quoted_in(reading.nodes, alone=False) and not last.quoted_in(reading.nodes):
        return None
    elsewhere = last.opening != reading.opening
    content = last.turn.message.content
    inside = content.partition(SUMMARY[0])[2].partition(SUMMARY[1])[0] if all(mark in content for mark in SUMMARY) else ""
    text = (inside or content).strip()
    return last if len(text) >= TELLING and reading.says(text, assistants=elsewhere) else None


def _added_to(reading: Reading, last: Reading) -> Reading | None:
    """The call just before, whose text the harness itself adds to a history that it keeps (Terminus 2)."""
    return last if last is not reading.before and _leads_to(last, reading) else None


def _steps(reading: Reading, summary: Reading, readings: Sequence[Reading]) -> Iterator[Reading]:
    """A summary, the calls right before it that led to it, and attempts that were given up: they too went on from where `reading` does."""
    if reading.before is not None and reading.extends and not reading.turn.tools:
        between = readings[reading.before.turn.index + 1 : summary.turn.index]
        yield from (other for other in between if other.before is reading.before)
    yield summary
    for step in reversed(readings[: readings.index(summary)]):
        if not _leads_to(step, summary):
            return
        yield step
        summary = step


def _leads_to(step: Reading, reading: Reading) -> bool:
    """Where nobody has tools, and both have one system prompt or none: the request quotes the call's words."""
    alike = step.opening == reading.opening and step.turn.thread == reading.turn.thread
    return alike and not step.turn.tools and step.quoted_in(reading.tail)


def _assign(reading: Reading, earlier: Sequence[Reading], *, summary: bool, with_tools: bool) -> None:
    """`with_tools`: calls of this thread have tools, so that one without is the harness's own."""
    before, side = reading.before, BranchClass.SUMMARY if summary else reading.turn.side
    if before is not None and reading.extends and before.turn.thread == reading.turn.thread:
        reading.conversation, reading.branch_class = before.conversation, side or before.branch_class
        return
    if side is None and with_tools and not reading.turn.tools:
        side = BranchClass.SUMMARY if _carries_history(reading, earlier) else BranchClass.AUXILIARY
    main = next((other for other in earlier if other.branch_class is BranchClass.POLICY), None)
    known = _known(reading, [other for other in earlier if other.branch_class not in SIDE])
    if side is None and known is not None and _borrows(reading, known):
        side = BranchClass.AUXILIARY
    reading.conversation = known.conversation if known else len(earlier)
    reading.branch_class = side or (known.branch_class if known else BranchClass.POLICY if main is None else BranchClass.SUB_AGENT)


def _known(reading: Reading, turns: Sequence[Reading]) -> Reading | None:
    """The newest turn of the conversation that a call goes on with, None when it opens one."""
    mine = [other for other in turns if other.turn.thread == reading.turn.thread]
    if reading.turn.thread or any(other.turn.thread for other in turns):  # then the nameless thread is one conversation (Claude Code)
        return mine[-1] if mine else None
    told = (other for other in reversed(mine) if other.turn.message.tool_calls or len(other.turn.message.content) >= TELLING)
    if (other := next((other for other in told if reading.holds(other.turn)), None)) is not None:
        return other
    firsts = {other.conversation: other for other in reversed(mine)}
    newest = {other.conversation: other for other in mine if other.opening == reading.opening}
    for conversation, other in sorted(newest.items(), key=lambda item: -item[1].turn.index):
        if reading.summary is not None or reading.starts_like(firsts[conversation]):
            return other
        if other.branch_class is BranchClass.POLICY and not _waits(
            other, reading
        ):  # two sub-agents of one kind differ in what they were told first
            return other
    return None


def _waits(parent: Reading, reading: Reading) -> bool:
    """The parent goes on behind a call that holds nothing of its own: an agent of its own kind that one of its tools started. After a
    compaction nobody goes on from the old history."""
    return bool(parent.turn.message.tool_calls) and parent.followed > reading.turn.index and not reading.turns


def _borrows(reading: Reading, known: Reading) -> bool:
    """qwen-code lets an agent with its own system prompt and tools read the parent's history, and takes nothing of it over."""
    opening, other = reading.opening, known.opening
    return not reading.turn.thread and reading.summary is None and opening[0] != other[0] and opening[1] != other[1]


def _carries_history(reading: Reading, earlier: Sequence[Reading]) -> bool:
    """A call without tools that holds turns of the conversation, as messages or flattened into one text."""
    mine = [other for other in earlier if other.turn.thread == reading.turn.thread]
    said = [text.strip() for other in mine[-RECENT:] for text in (other.turn.message.content, *other.results)]
    telling = {text for text in said if len(text) >= TELLING}
    held = sum(reading.says(text, assistants=True) for text in telling)
    if reading.echoed or (held and held >= min(2, len(telling))):  # a title may quote the one answer that it names
        return True
    copied = _spoken(reading)[:-1]  # behind it stands what to do with it
    return len(copied) > 1 and any(_spoken(other)[: len(copied)] == copied for other in mine[-RECENT:])


def _spoken(reading: Reading) -> list[Key]:
    return [node.message.key for node in reading.nodes if node.message.role != "system"]
