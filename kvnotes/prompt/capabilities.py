"""What orders of messages a chat template keeps in place, found by rendering.

Owns the probes. That a template raises is not the test: some hoist or merge silently.
"Kept in place" means that a message's content follows what stands before it, and leaves that
as it would be without the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvnotes.prompt.chat import ChatTemplate
from kvnotes.prompt.shape import message

After = Literal["user", "assistant", "system", "tool", "start"]

_SYSTEM = message("system", "qzsys1")
_SYSTEM_2 = message("system", "qzsys2")
_USER = message("user", "qzuser3")
_USER_2 = message("user", "qzuser4")
_USER_3 = message("user", "qzuser9")
_REPLY = message("assistant", "qzreply0")
_ASSISTANT = message("assistant", "qzassistant5")
_THINKING = message("assistant", "<think>\nqzthink6\n</think>\n\nqzassistant7")
_TOOL = message("tool", "qztool8")


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a chat template does with messages.

    Args:
        system: A leading system message is kept as a message of its own, merged into a user
            message, or dropped or refused.
        adjacent_system: Two system messages in a row are both kept in place.
        late_system_after_user: A system message after a user message is kept in place.
        late_system_after_assistant: The same after an assistant message.
        late_system_after_tool: The same after a tool message.
        adjacent_user: Two user messages in a row are both kept in place.
        user_after_tool: A user message after a tool message is kept in place.
        tool_role: Tool messages are kept in place.
        prefix_stable: Appending a turn never changes the rendering of what stands before,
            also of assistant turns with a thinking block.
    """

    system: Literal["keep", "merged", "none"]
    adjacent_system: bool
    late_system_after_user: bool
    late_system_after_assistant: bool
    late_system_after_tool: bool
    adjacent_user: bool
    user_after_tool: bool
    tool_role: bool
    prefix_stable: bool

    def erratum_role(self, after: After) -> Literal["system", "user", "tool"]:
        """Return the role in which a late trusted message is kept in place.

        Args:
            after: Role of the message before it, or "start".
        """
        if self.system != "none" and after in ("start", "system"):
            return "system"
        late = {
            "user": self.late_system_after_user,
            "assistant": self.late_system_after_assistant,
            "tool": self.late_system_after_tool,
        }
        if late.get(after, False):
            return "system"
        if after == "tool" and self.tool_role and not self.user_after_tool:
            return "tool"
        return "user"


def probe(chat: ChatTemplate) -> TemplateCapabilities:
    """Find the capabilities of a chat template by rendering small conversations."""
    system = _probe_system(chat)
    head = [_USER] if system == "none" else [_SYSTEM, _USER]
    turn = [*head, _ASSISTANT]
    tool = [*turn, _TOOL]
    return TemplateCapabilities(
        system=system,
        adjacent_system=system == "keep" and _adjacent_system(chat),
        late_system_after_user=_kept(chat, head, _SYSTEM_2),
        late_system_after_assistant=_kept(chat, turn, _SYSTEM_2),
        late_system_after_tool=_kept(chat, tool, _SYSTEM_2),
        adjacent_user=_kept(chat, head, _USER_2),
        user_after_tool=_kept(chat, tool, _USER_2),
        tool_role=_kept(chat, turn, _TOOL),
        prefix_stable=_prefix_stable(chat, head),
    )


def _probe_system(chat: ChatTemplate) -> Literal["keep", "merged", "none"]:
    """Kept means: the user's own header stands between the system text and the user's."""
    both = chat.try_render([_SYSTEM, _USER])
    turns = chat.try_render([_USER, _ASSISTANT, _USER_2])
    if both is None or turns is None:
        return "none"
    start, stop = both.find(_SYSTEM["content"]), both.find(_USER["content"])
    if start < 0 or stop < 0:
        return "none"
    if stop < start:
        return "merged"
    first = turns[: turns.find(_USER["content"])]
    later = turns[: turns.find(_USER_2["content"])]
    between = both[start + len(_SYSTEM["content"]) : stop]
    header = _common_suffix(_common_suffix(first, later), between)
    return "keep" if header.strip() else "merged"


def _adjacent_system(chat: ChatTemplate) -> bool:
    alone = chat.try_render([_SYSTEM])
    if alone is None:
        # Some templates refuse a prompt without a user message; then order has to do.
        full = chat.try_render([_SYSTEM, _SYSTEM_2, _USER])
        places = [(full or "").find(m["content"]) for m in (_SYSTEM, _SYSTEM_2, _USER)]
        return places[0] >= 0 and places == sorted(set(places))
    return _kept(chat, [_SYSTEM], _SYSTEM_2)


def _kept(chat: ChatTemplate, before: list[dict[str, str]], late: dict[str, str]) -> bool:
    """Whether `late` is kept in place, also once another message follows it.

    Everything up to the last content before it must be as it is in a conversation that goes
    on without it. The bare beginning is no measure: some templates open their last turn
    otherwise (an empty think block), and that is not the late message's doing.
    """
    last = before[-1]["content"]
    role = before[-1]["role"]
    without = chat.try_render([*before, _USER_3 if role in ("assistant", "system") else _REPLY])
    grown = chat.try_render([*before, late])
    follower = _USER_3 if late["role"] == "system" and role in ("assistant", "system") else _REPLY
    whole = chat.try_render([*before, late, follower])
    if without is None or grown is None or whole is None or last not in without:
        return False
    stop = without.find(last) + len(last)
    place = grown.find(late["content"], stop)
    late_stop = place + len(late["content"])
    return (
        place >= 0
        and grown.startswith(without[:stop])
        and whole.startswith(grown[:late_stop])
        and follower["content"] in whole[late_stop:]
    )


def _prefix_stable(chat: ChatTemplate, head: list[dict[str, str]]) -> bool:
    messages = [*head, _THINKING, _USER_2, _ASSISTANT, _USER]
    shorter = chat.try_render(head)
    for count in range(len(head) + 1, len(messages) + 1):
        longer = chat.try_render(messages[:count])
        if shorter is None or longer is None or not longer.startswith(shorter):
            return False
        shorter = longer
    return True


def _common_suffix(a: str, b: str) -> str:
    size = 0
    while size < min(len(a), len(b)) and a[-1 - size] == b[-1 - size]:
        size += 1
    return a[len(a) - size :]
