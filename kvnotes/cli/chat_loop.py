"""The turns and commands of `kvnotes chat`.

Owns what a line means. Replies go to stdout, everything else to stderr, so that a pipe gets
the conversation alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from kvnotes.cli.explain_table import meaning
from kvnotes.cli.output import print_json
from kvnotes.cli.records import TurnRecord, turn_record
from kvnotes.cli.table import clean, ms
from kvnotes.errors import KVNotesError, PlanError, nearest

if TYPE_CHECKING:
    from kvnotes.engine.base import SamplingParams
    from kvnotes.library import Library
    from kvnotes.session import Session, Turn


class ChatRecord(BaseModel):
    """One line of `kvnotes chat --json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    said: str
    reply: str | None
    turn: TurnRecord | None
    error: str | None = None


class ChatLoop:
    """A conversation that takes lines.

    Args:
        session: The conversation.
        library: Where /skill looks.
        params: How replies are generated.
        json: Print a JSON line for each turn instead of text.
        quiet: No line about what was reused.
    """

    prompt = "> "

    def __init__(
        self, session: Session, library: Library, params: SamplingParams, *, json: bool, quiet: bool
    ) -> None:
        self.session = session
        self._library = library
        self._params = params
        self._json = json
        self._quiet = quiet
        self._number = 0
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "set": self._set,
            "fields": self._fields,
            "messages": self._messages,
            "skill": self._skill,
            "drop": self._drop,
            "verify": self._verify,
            "fork": self._fork,
            "save": self._save,
        }

    def run(self, lines: Iterable[str]) -> None:
        """Take lines until they end, or one says /quit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            try:
                if text.startswith("/"):
                    self._command(text[1:])
                elif text:
                    self._turn(text)
            except KVNotesError as error:
                self._failed(text, error)
            except KeyboardInterrupt:
                self._say("\nstopped; what was generated is kept. /quit ends the conversation")

    # -- turns -----------------------------------------------------------------------------

    def _turn(self, text: str) -> None:
        self._number += 1
        self.session.add("user", text)
        stream = self.session.stream(self._params)
        pieces: list[str] = []
        for piece in stream:
            pieces.append(piece)
            if not self._json:
                sys.stdout.write(clean(piece))
                sys.stdout.flush()
        record = turn_record(self._number, "user", stream.turn)
        if self._json:
            print_json(ChatRecord(said=text, reply="".join(pieces), turn=record).model_dump_json())
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._say_turn(stream.turn)

    def _say_turn(self, turn: Turn) -> None:
        """Say in one line where the tokens of a turn came from."""
        if self._quiet:
            return
        tokens = turn.plan.tokens
        parts = [f"{tokens.reused:,} token{'' if tokens.reused == 1 else 's'} reused"]
        parts += [f"{tokens.moved:,} moved"] if tokens.moved else []
        parts += [f"{tokens.computed:,} computed"]
        parts += [f"{ms(turn.ttft_ms)} ms to the first token"] if turn.ttft_ms else []
        parts += [turn.strategy, "exact" if turn.plan.exact else "not exact"]
        self._say(" | ".join(parts))
        for notice in (*([turn.fallback_reason] if turn.fallback_reason else []), *turn.notices):
            self._say(f"  {notice}{meaning(notice)}")

    def _failed(self, text: str, error: KVNotesError) -> None:
        if self._json:
            record = ChatRecord(said=text, reply=None, turn=None, error=error.message)
            print_json(record.model_dump_json())
        self._err.print(Text.assemble(("error:", "bold red"), f" {clean(error.message)}"))
        if error.hint:
            self._err.print(Text.assemble(("hint:", "bold"), f" {clean(error.hint)}"))

    # -- commands --------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        action = self._commands.get(name)
        if action is None:
            raise PlanError(f"no command /{name}", hint=nearest(name, self._commands))
        action(rest.strip())

    def _help(self, _: str) -> None:
        """List the commands."""
        width = max(map(len, _USAGE)) + 2
        for usage, what in _USAGE.items():
            self._say(f"{usage:{width}}{what}")

    def _set(self, rest: str) -> None:
        from kvnotes.cli.commands.chat import parse_value

        name, value = parse_value(rest)
        self._say_waiting(self.session.edit({name: value}))

    def _fields(self, _: str) -> None:
        for name, value in self.session.values.items():
            self._say(f"{name} = {value}")
        if not self.session.values:
            self._say("no fields")

    def _messages(self, _: str) -> None:
        for message in self.session.messages:
            text = message.content if message.segment is None else f"[skill {message.segment}]"
            self._say(f"{message.id:8} {message.role:10} {text[:100]!r}")

    def _skill(self, ref: str) -> None:
        skill = self._library.get(ref)
        values = {name: given[0] for name, given in skill.variants} | dict(skill.fields)
        own = self.session.values
        brought = {name: value for name, value in values.items() if name not in own}
        role = skill.message().role
        self._say_waiting(self.session.splice(skill.segment, role=role, values=brought))

    def _drop(self, id: str) -> None:
        self._say_waiting(self.session.delete(id))

    def _verify(self, _: str) -> None:
        done = self.session.verify()
        if not done.num_checked_tokens:
            self._say("everything was computed, or is exact by its lineage: nothing to check")
            return
        agreed = "is the same" if done.agreed else "is another"
        self._say(
            f"the most likely next token {agreed} as after a clean prefill; the check computed "
            f"{done.num_checked_tokens:,} tokens"
        )

    def _fork(self, id: str) -> None:
        self.session = self.session.fork(id=id)
        self._say(f"this is now {self.session.id}, a fork of {self.session.parent_id}")

    def _save(self, id: str) -> None:
        if id:
            self.session.id = id
        saved = self.session.save()
        self._say(f"saved {saved.num_tokens:,} tokens: kvnotes chat --resume {saved.id}")

    def _say_waiting(self, turn: Turn) -> None:
        """Say what a change will do; it is done with the next turn."""
        tokens = turn.plan.tokens
        self._say(
            f"waits for the next turn: {turn.strategy}, {tokens.reused:,} tokens reused, "
            f"{tokens.moved:,} moved, {tokens.computed:,} to compute"
        )

    def _say(self, text: str) -> None:
        self._err.print(Text(clean(text), style="dim"))


_USAGE = {
    "/set NAME=VALUE": "change a field",
    "/fields": "show the fields",
    "/skill SKILL": "splice a skill of the library in, as refunds@3",
    "/messages": "show the messages and their ids",
    "/drop ID": "remove a message",
    "/verify": "compare the cache with a clean prefill",
    "/fork [ID]": "go on in a fork of the conversation",
    "/save [ID]": "save the conversation, for kvnotes chat --resume",
    "/quit": "end",
}
