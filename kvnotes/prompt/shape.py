"""What a chat template writes between messages, learned from small conversations.

Owns terminators, role headers and the generation prompt as strings. Spans only trust them
where the rendered prompt shows the same characters, so a wrong guess costs time, not truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvnotes.prompt.chat import ChatTemplate

# Words that no template writes or changes; digits and one case, so trimming leaves them alone.
FIRST, SECOND, OTHER = "qzfirst1", "qzsecond2", "qzother3"
_CACHE = 64


@dataclass(frozen=True, slots=True)
class Gap:
    """The text between two contents: what ends the first message, what opens the second."""

    terminator: str
    header: str

    @property
    def text(self) -> str:
        """Both together."""
        return self.terminator + self.header


def message(role: str, content: str) -> dict[str, str]:
    """A message as templates take it."""
    return {"role": role, "content": content}


class ChatShape:
    """Terminators and headers of one chat template.

    Args:
        chat: The template.
        bos: The tokenizer's begin token as a string, or "".
    """

    def __init__(self, chat: ChatTemplate, bos: str) -> None:
        self._chat = chat
        self._bos = bos
        self.gaps = lru_cache(_CACHE)(self._gaps)
        self.generation = lru_cache(_CACHE)(self._generation)
        self.start = lru_cache(1)(self._start)

    def _gaps(self, before: str, after: str) -> tuple[Gap, ...]:
        """Gaps between a message of role `before` and one of role `after`, the longest first.

        A template may open its last turn otherwise than the ones before (an empty think
        block), so a conversation that ends there and one that goes on are both tried.
        """
        head = _context(before)
        alone = self._chat.try_render(head)
        tail = alone[alone.rfind(FIRST) + len(FIRST) :] if alone and FIRST in alone else ""
        found = set()
        more = "assistant" if after in ("user", "tool") else "user"
        for rest in ([], [message(more, OTHER)]):
            full = self._chat.try_render([*head, message(after, SECOND), *rest])
            if full is None or not -1 < full.find(FIRST) < full.find(SECOND):
                continue
            text = full[full.find(FIRST) + len(FIRST) : full.find(SECOND)]
            split = len(tail) if text.startswith(tail) else 0
            found.add(Gap(text[:split], text[split:]))
        return tuple(sorted(found, key=lambda gap: (-len(gap.text), gap.text)))

    def _generation(self, after: str) -> str | None:
        """The generation prompt after a message of role `after`; None where it is no suffix."""
        head = _context(after)
        plain = self._chat.try_render(head)
        asked = self._chat.try_render(head, add_generation_prompt=True)
        if plain is None or asked is None or not asked.startswith(plain):
            return None
        return asked[len(plain) :]

    def _start(self) -> str:
        """The begin token, where the template writes it once, before everything else."""
        full = self._chat.try_render([*_context("assistant"), message("user", SECOND)])
        if full and self._bos and full.startswith(self._bos) and full.count(self._bos) == 1:
            return self._bos
        return ""


def _context(role: str) -> list[dict[str, str]]:
    """A small conversation that ends with a message of this role, whose content is FIRST."""
    before = {
        "system": [],
        "user": [],
        "assistant": [message("user", OTHER)],
        "tool": [message("user", OTHER), message("assistant", OTHER)],
    }[role]
    return [*before, message(role, FIRST)]
