"""What differs between a request and the one before it, and which tokens that invalidates.

    old:  tools        | system | user | assistant | user
    new:  tools, other | system | user | assistant | user | assistant | user
                  ^ first difference                    ^ shared end, the rest is new

Owns the alignment of two requests. What stands between a difference and the shared end was
computed before and must be computed again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvnotes.lint.findings import Change, Kind
from kvnotes.lint.hunks import changed_ranges, contains, hunks, is_reordering, is_similar
from kvnotes.lint.requests import PROMPT, Message, Request, Tool, message_name
from kvnotes.lint.text import Value, find_values

MAX_MESSAGES = 1000
"""Most messages between equal beginnings and ends that are matched with each other."""

MAX_FRAME = 64
"""Characters behind a new question that a prompt ends with, such as the assistant's name."""

_AROUND = 240
"""Characters round a changed piece in which the value is looked for that it is a part of."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was in the request before.

    Attributes:
        kind: A kind of value, or what else was changed.
        part: Part of the new request where it stands.
        index: Index of that part among all parts of the new request.
        start: First character of it in that part.
        stop: Character after its last.
        old: What stood there before.
        new: What stands there now.
        line: The line round it, numbers masked: the same in each request of a log.
    """

    kind: Kind | Change
    part: str
    index: int
    start: int
    stop: int
    old: str
    new: str
    line: str


@dataclass(frozen=True, slots=True)
class Place:
    """A character in a request: the index of a part, and the character in it."""

    index: int
    start: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A request against the one before it.

    Attributes:
        differences: In the order of the new request.
        shared_end: Behind the last text that the request before had too.
        continues: The new request goes on where the old one was, with or without faults; if
            not, it is another conversation with the same beginning.
    """

    differences: tuple[Difference, ...]
    shared_end: Place
    continues: bool


def compare(old: Request, new: Request) -> Comparison:
    """Compare a request with the one before it; what is appended is no difference."""
    tools = tuple(_tool_differences(old.tools, new.tools))
    messages = _Messages(old.messages, new.messages, first=len(new.tools))
    found = messages.differences
    end = messages.shared_end
    if not end.index and not end.start and set(old.tools) & set(new.tools):
        end = Place(len(new.tools), 0)
    inside = [d for d in (*tools, *found) if (d.index, d.start) < (end.index, end.start)]
    inside.sort(key=lambda d: (d.index, d.start))
    return Comparison(tuple(inside), end, messages.continues)


def _tool_differences(old: Sequence[Tool], new: Sequence[Tool]) -> Iterator[Difference]:
    """Yield how two lists of tools differ; each name counts once."""
    if old == new:
        return
    before, after = {t.name: t for t in old}, {t.name: t for t in new}
    kept_before = [name for name in before if name in after]
    kept_after = [name for name in after if name in before]
    if kept_before != kept_after:
        pairs = zip(kept_before, kept_after, strict=True)
        moved = next(name for was, name in pairs if was != name)
        yield _tool_difference(
            "tools-reordered", new, moved, ", ".join(kept_before), ", ".join(kept_after)
        )
    for name in after:
        if name not in before:
            yield _tool_difference("tool-added", new, name, "", name)
        elif before[name].text != after[name].text:
            yield _changed_tool(before[name], after[name], new)
    for place, name in enumerate(before):
        if name not in after:
            follower = next((n for n in list(before)[place + 1 :] if n in after), None)
            yield _tool_difference("tool-removed", new, follower, name, "")


def _tool_difference(
    kind: Change, tools: Sequence[Tool], name: str | None, old: str, new: str
) -> Difference:
    """Return a difference at the tool of that name; None is behind the last tool."""
    index = next((i for i, tool in enumerate(tools) if tool.name == name), len(tools))
    part = f"tools[{index}] {name}" if name is not None else "tools"
    return Difference(kind, part, index, 0, 0, old, new, "")


def _changed_tool(old: Tool, new: Tool, tools: Sequence[Tool]) -> Difference:
    index = tools.index(new)
    same = json.loads(old.text) == json.loads(new.text)
    kind: Change = "tool-keys-reordered" if same else "tool-changed"
    hunk = hunks(old.text, new.text)[0]
    pieces = old.text[hunk.old_start : hunk.old_stop], new.text[hunk.start : hunk.stop]
    return Difference(kind, f"tools[{index}] {new.name}", index, hunk.start, hunk.stop, *pieces, "")


class _Messages:
    """The alignment of two lists of messages."""

    def __init__(self, old: Sequence[Message], new: Sequence[Message], *, first: int) -> None:
        self._old, self._new, self._first = old, new, first
        self.differences: list[Difference] = []
        self.shared_end = Place(0, 0)
        self.continues = True
        changed = list(changed_ranges(old, new, MAX_MESSAGES))
        left = Counter(old[i] for i1, i2, _, _ in changed for i in range(i1, i2))
        come = Counter(new[j] for _, _, j1, j2 in changed for j in range(j1, j2))
        self._moved = left & come
        done = 0
        for i1, i2, j1, j2 in [*changed, (len(old), len(old), len(new), len(new))]:
            if j1 > done:  # what stands between two changes is equal
                self._share(Place(first + j1, 0))
            self._unequal(range(i1, i2), range(j1, j2))
            done = j2

    def _share(self, place: Place) -> None:
        self.shared_end = max(self.shared_end, place, key=lambda p: (p.index, p.start))

    def _unequal(self, old: range, new: range) -> None:
        """Note what became of some old messages that stand where the new ones stand now."""
        at_end = old.stop == len(self._old)
        pairs = list(self._pairs(old, new, at_end))
        for i, j in pairs:
            self._rewritten(i, j, at_end and i == old.stop - 1)
        lost = [i for i in old if i not in {pair[0] for pair in pairs}]
        added = [j for j in new if j not in {pair[1] for pair in pairs}]
        if at_end and lost and added:
            self.continues = False
        for j in added:
            if self._new[j] in self._moved:
                self._share(Place(self._first + j + 1, 0))
                self._note("message-moved", j, "", self._new[j].text)
        gone = [self._old[i].text for i in lost if self._old[i] not in self._moved]
        come = [j for j in added if self._new[j] not in self._moved]
        if at_end or not (gone or come):
            return
        place = come[0] if come else new.stop
        kind: Change = "message-removed" if not come else "message-inserted"
        if gone and come:
            kind = "message-rewritten"
        self._note(kind, place, gone[0] if gone else "", self._new[place].text if come else "")

    def _pairs(self, old: range, new: range, at_end: bool) -> Iterator[tuple[int, int]]:
        """Yield which old message is an earlier version of which new one, in order."""
        start = new.start
        for i in old:
            for j in range(start, new.stop):
                if self._is_version(self._old[i], self._new[j], at_end):
                    yield i, j
                    start = j + 1
                    break

    def _is_version(self, old: Message, new: Message, at_end: bool) -> bool:
        """Whether a message is another one's version; at the end a similar one is a new one."""
        if old.role != new.role or old in self._moved or new in self._moved:
            return False
        if old.role in ("system", "developer", PROMPT):
            return True
        return contains(old.text, new.text) if at_end else is_similar(old.text, new.text)

    def _rewritten(self, i: int, j: int, is_last: bool) -> None:
        """Note what differs in a message; what replaces the end of the last one is new text."""
        old, new = self._old[i].text, self._new[j].text
        index = self._first + j
        found = list(text_differences(old, new, message_name(j, self._new[j]), index))
        pieces = hunks(old, new)
        open_end = is_last and len(old) - pieces[-1].old_stop <= MAX_FRAME
        self._share(Place(index, pieces[-1].start) if open_end else Place(index + 1, 0))
        if open_end and pieces[-1].old_start < len(old):
            self.continues = False
        self.differences += found

    def _note(self, kind: Change, j: int, old: str, new: str) -> None:
        name = message_name(j, self._new[j]) if j < len(self._new) else "messages"
        self.differences.append(Difference(kind, name, self._first + j, 0, 0, old, new, ""))


def text_differences(old: str, new: str, part: str, index: int) -> Iterator[Difference]:
    """Yield what differs between two versions of a part.

    Args:
        old: Its text before.
        new: Its text now.
        part: What to call it.
        index: Its index among the parts of the new request.
    """
    pieces = hunks(old, new)
    if is_reordering(old, new):
        start, stop = pieces[0].start, pieces[-1].stop
        shown = old[pieces[0].old_start : pieces[-1].old_stop], new[start:stop]
        yield Difference("lines-reordered", part, index, start, stop, *shown, "")
        return
    seen: set[tuple[int, int]] = set()
    for piece in pieces:
        was = _value_round(old, piece.old_start, piece.old_stop)
        now = _value_round(new, piece.start, piece.stop)
        start, stop = (now.start, now.stop) if now else (piece.start, piece.stop)
        if (start, stop) in seen:
            continue
        seen.add((start, stop))
        value = now or (was if start < stop else None)
        before = old[was.start : was.stop] if was else old[piece.old_start : piece.old_stop]
        kind: Kind | Change = value.kind if value else "changed-text"
        line = _line_round(new, start)
        yield Difference(kind, part, index, start, stop, before, new[start:stop], line)


def _value_round(text: str, start: int, stop: int) -> Value | None:
    """Return the value that a range is a piece of."""
    if stop - start > _AROUND:
        return None
    head = max(text.rfind("\n", 0, start) + 1, start - _AROUND)
    tail = text.find("\n", stop)
    near = text[head : min(len(text) if tail < 0 else tail, stop + _AROUND)]
    for value in find_values(near):
        if head + value.start <= start and stop <= head + value.stop:
            return Value(head + value.start, head + value.stop, value.kind)
    return None


def _line_round(text: str, position: int) -> str:
    """Return the words before a place on its line, numbers masked."""
    head = text.rfind("\n", 0, position) + 1
    return "".join("0" if c.isdigit() else c for c in text[max(head, position - 60) : position])
