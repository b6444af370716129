"""Replies as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

from kvnotes.engine.base import SamplingParams, Stopwatch
from kvnotes.errors import EngineError
from kvnotes.session.conversation import Conversation
from kvnotes.session.reply import Reply
from kvnotes.session.report import Turn


class Stream(Iterator[str]):
    """The assistant's next message, piece by piece.

    Nothing is computed before the first piece is asked for. The history has the message at
    the end, and what was generated if the caller closes the stream before.

    Args:
        talk: The conversation it belongs to.
        params: How it is generated.
        new_id: Gives the message its id.
    """

    def __init__(
        self, talk: Conversation, params: SamplingParams, new_id: Callable[[], str]
    ) -> None:
        self._turn: Turn | None = None
        self._pieces = self._generated(talk, params, new_id)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here; what was generated is kept."""
        self._pieces.close()

    @property
    def turn(self) -> Turn:
        """What was reused, moved and computed before the first piece.

        Raises:
            EngineError: Nothing was asked for yet.
        """
        if self._turn is None:
            raise EngineError("the stream has not begun", hint="read its turn after its text")
        return self._turn

    def _generated(
        self, talk: Conversation, params: SamplingParams, new_id: Callable[[], str]
    ) -> Generator[str, None, None]:
        watch = Stopwatch()
        with talk.undone_on_error():
            execution, prompt, self._turn = talk.run((), None, watch, reserve=params.max_new_tokens)
            answer = Reply(talk.model, execution, params)
            del execution
            with suppress(GeneratorExit):
                yield from answer
            talk.keep_reply(prompt, answer.message(new_id()), answer.cache)
