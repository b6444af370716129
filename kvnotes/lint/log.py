"""The lint of a log: what made requests miss the prefix that the ones before them had cached.

Owns the sums over a log: what each cause invalidates, and what one change would save. A request
is compared with the one that it continues; what is only appended is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvnotes.lint.compare import Comparison, Difference, Place, compare
from kvnotes.lint.findings import Change, Kind, advice_for
from kvnotes.lint.requests import Request, parse_request
from kvnotes.lint.threads import Threads
from kvnotes.lint.tokens import CountTokens, suffix_counter


@dataclass(frozen=True, slots=True)
class Miss:
    """Where a request first differs from the one before it.

    Attributes:
        request: Its number in the log, from 1.
        previous: The number of the one before it.
        kind: What differs there.
        part: In which part of the request.
        start: First character of it in that part.
        line: Its line in the part, from 1.
        column: Its column in that line, from 1.
        old: What stood there before.
        new: What stands there now.
        num_differences: How many things differ before the end of what both have.
        num_invalidated_tokens: Tokens from there to the end of what both have.
        num_shared_tokens: Tokens of the request that the one before had too.
    """

    request: int
    previous: int
    kind: Kind | Change
    part: str
    start: int
    line: int
    column: int
    old: str
    new: str
    num_differences: int
    num_invalidated_tokens: int
    num_shared_tokens: int


@dataclass(frozen=True, slots=True)
class Cause:
    """Differences of one kind at one place, over the whole log.

    Attributes:
        kind: What differs.
        part: In which part of the requests.
        num_requests: Requests that it is in.
        num_invalidated_tokens: Tokens behind it that were computed before, summed. Causes that
            stand in the same requests count the same tokens.
        num_saved_tokens: Tokens that need not be computed again if only this is put right.
        share: The first over all tokens that requests could have reused.
        old: What stood there, in the request where it cost most.
        new: What came in its place.
        request: The number of that request.
        advice: What to do about it.
    """

    kind: Kind | Change
    part: str
    num_requests: int
    num_invalidated_tokens: int
    num_saved_tokens: int
    share: float
    old: str
    new: str
    request: int
    advice: str


@dataclass(frozen=True, slots=True)
class LogReport:
    """What a log says.

    Attributes:
        num_requests: Requests in it.
        num_compared: Those that continue an earlier one, or begin like it.
        num_tokens: Tokens of all requests.
        num_reusable_tokens: Tokens that the request before had too, at whatever place.
        num_invalidated_tokens: Those of them that stand behind a difference.
        causes: What differs, the most expensive first.
        misses: Each request that differs from the one before it, in order.
    """

    num_requests: int
    num_compared: int
    num_tokens: int
    num_reusable_tokens: int
    num_invalidated_tokens: int
    causes: tuple[Cause, ...]
    misses: tuple[Miss, ...]


def lint_requests(
    prompts: Sequence[object],
    *,
    count_tokens: CountTokens | None = None,
    ignore: Collection[str] = (),
) -> LogReport:
    """Compare each request of a log with the one that it continues.

    Args:
        prompts: Requests in the order they were sent: `Request`s, or JSON data as
            `parse_request` takes it.
        count_tokens: `count_tokens(text, start)` returns the tokens of `text` from the one that
            holds character `start` on. None estimates them from the number of bytes.
        ignore: Kinds that are not reported; what they invalidate counts as reusable.

    Returns:
        The sums, the causes and the misses.

    Raises:
        InputError: An entry is no request.
    """
    requests = [p if isinstance(p, Request) else parse_request(p) for p in prompts]
    threads, tally = Threads(), _Tally(count_tokens, ignore)
    for number, request in enumerate(requests, 1):
        tally.request(request)
        previous = threads.previous(request)
        if previous is None:
            threads.add(number, request, instead_of=None)
            continue
        comparison = compare(requests[previous - 1], request)
        tally.compared(number, previous, request, comparison)
        threads.add(number, request, instead_of=previous if comparison.continues else None)
    return tally.report(len(requests))


class _Tally:
    """Sums over the comparisons of a log."""

    def __init__(self, count_tokens: CountTokens | None, ignore: Collection[str]) -> None:
        self._count_tokens, self._ignore = count_tokens, ignore
        self._totals: dict[str, int] = {}
        self._num_tokens = self._num_compared = self._num_reusable = self._num_lost = 0
        self._causes: dict[tuple[str, ...], _Cause] = {}
        self._misses: list[Miss] = []

    def request(self, request: Request) -> None:
        self._num_tokens += sum(self._total(part.text) for part in request.parts)

    def compared(
        self, number: int, previous: int, request: Request, comparison: Comparison
    ) -> None:
        behind = self._tokens_behind(request)
        end = behind(comparison.shared_end)
        shared = behind(Place(0, 0)) - end
        self._num_compared += 1
        self._num_reusable += shared
        found = [d for d in comparison.differences if d.kind not in self._ignore]
        if not found:
            return
        costs = [behind(Place(d.index, d.start)) - end for d in found]
        self._num_lost += costs[0]
        keys = [_key(difference) for difference in found]
        left = next((cost for key, cost in zip(keys, costs, strict=True) if key != keys[0]), 0)
        for key in dict.fromkeys(keys):
            index = keys.index(key)
            cause = self._causes.setdefault(key, _Cause(found[index]))
            saved = costs[0] - left if index == 0 else 0
            cause.add(number, found[index], costs[index], saved)
        self._misses.append(_miss(number, previous, request, found, costs[0], shared))

    def report(self, num_requests: int) -> LogReport:
        causes = (cause.done(self._num_reusable) for cause in self._causes.values())
        return LogReport(
            num_requests,
            self._num_compared,
            self._num_tokens,
            self._num_reusable,
            self._num_lost,
            tuple(sorted(causes, key=lambda c: -c.num_invalidated_tokens)),
            tuple(self._misses),
        )

    def _total(self, text: str) -> int:
        if text not in self._totals:
            self._totals[text] = suffix_counter(text, self._count_tokens)(0)
        return self._totals[text]

    def _tokens_behind(self, request: Request) -> Callable[[Place], int]:
        """Return a function from a place of the request to the tokens from there on."""
        parts = request.parts
        sums = [0]
        for part in reversed(parts):
            sums.append(sums[-1] + self._total(part.text))
        sums.reverse()

        def behind(place: Place) -> int:
            if not place.start or place.index >= len(parts):
                return sums[min(place.index, len(parts))]
            counter = suffix_counter(parts[place.index].text, self._count_tokens)
            return counter(place.start) + sums[place.index + 1]

        return behind


class _Cause:
    """One cause while it is summed."""

    def __init__(self, difference: Difference) -> None:
        self._kind, self._part = difference.kind, _place_name(difference)
        self._num_requests = self._cost = self._saved = 0
        self._worst: tuple[int, int, Difference] = (-1, 0, difference)

    def add(self, number: int, difference: Difference, cost: int, saved: int) -> None:
        self._num_requests += 1
        self._cost += cost
        self._saved += saved
        if cost > self._worst[0]:
            self._worst = (cost, number, difference)

    def done(self, num_reusable: int) -> Cause:
        _, number, worst = self._worst
        return Cause(
            self._kind,
            self._part,
            self._num_requests,
            self._cost,
            self._saved,
            self._cost / num_reusable if num_reusable else 0.0,
            worst.old,
            worst.new,
            number,
            advice_for(self._kind),
        )


def _key(difference: Difference) -> tuple[str, ...]:
    """Return what the same cause has in every request: tools and history count by their kind."""
    if difference.part.startswith("tools") and difference.kind != "tool-changed":
        return (difference.kind,)
    return difference.kind, _place_name(difference), difference.line


def _place_name(difference: Difference) -> str:
    """Return the part's name, without its number where that changes from request to request."""
    name, _, role = difference.part.partition(" ")
    if name.startswith("tools"):
        return f"tools {role}".strip() if difference.kind == "tool-changed" else "tools"
    return difference.part if role in ("", "system", "developer") else f"messages {role}"


def _miss(
    number: int,
    previous: int,
    request: Request,
    found: Sequence[Difference],
    cost: int,
    shared: int,
) -> Miss:
    first = found[0]
    texts = [part.text for part in request.parts]
    text = texts[first.index] if first.index < len(texts) else ""
    head = text.rfind("\n", 0, first.start) + 1
    return Miss(
        number,
        previous,
        first.kind,
        first.part,
        first.start,
        text.count("\n", 0, first.start) + 1,
        first.start - head + 1,
        first.old,
        first.new,
        len(found),
        cost,
        shared,
    )
