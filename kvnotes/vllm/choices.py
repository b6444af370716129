"""Scoring choices by reading the next token behind each of their beginnings.

Owns which prompts are sent and which log-probabilities are wanted of each. Choices that begin alike
share what they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvnotes.vllm.bodies import MAX_WANTED

MAX_PROMPTS = 64
"""Prompts of one request; vLLM takes 1,024, and each of them is sent whole."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """One request.

    Args:
        beginnings: What stands behind the prompt, for each prompt that is sent.
        wanted: Ids of next tokens, all of them for each prompt.
    """

    beginnings: tuple[Ids, ...]
    wanted: Ids


def reads(choices: Iterable[Sequence[int]]) -> list[Read]:
    """Return the requests that score choices; the first of them sends the bare prompt alone.

    What a reply says it had cached is about one prompt, so that is asked for by itself; the prompts
    of later requests find it in the server's cache.
    """
    following: dict[Ids, set[int]] = {}
    for choice in choices:
        for index, token_id in enumerate(choice):
            following.setdefault(tuple(choice[:index]), set()).add(token_id)
    first = following.pop((), set())
    found = [Read(((),), part) for part in _parts(first)]
    together: list[Ids] = []
    wanted: set[int] = set()
    for beginning in sorted(following, key=lambda ids: (len(ids), ids)):
        *full, rest = _parts(following[beginning])
        found += [Read((beginning,), part) for part in full]
        if len(wanted.union(rest)) > MAX_WANTED or len(together) == MAX_PROMPTS:
            found.append(Read(tuple(together), tuple(sorted(wanted))))
            together, wanted = [], set()
        together.append(beginning)
        wanted.update(rest)
    if together:
        found.append(Read(tuple(together), tuple(sorted(wanted))))
    return found


def sums(choices: Iterable[Sequence[int]], found: Mapping[Ids, float]) -> tuple[float, ...]:
    """Return the summed log-probability of each choice.

    Args:
        choices: Their tokens.
        found: Log-probability of the last token of each beginning, behind those before it.
    """
    return tuple(
        sum(found[tuple(choice[: index + 1])] for index in range(len(choice))) for choice in choices
    )


def _parts(ids: Iterable[int]) -> list[Ids]:
    ordered = sorted(ids)
    return [
        tuple(ordered[start : start + MAX_WANTED]) for start in range(0, len(ordered), MAX_WANTED)
    ]
