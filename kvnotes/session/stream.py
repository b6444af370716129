"""Replies as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress

from kvnotes.engine.base import SamplingParams, Stopwatch
from kvnotes.engine.exchange import Exchange
from kvnotes.errors import EngineError
from kvnotes.session.conversation import Conversation
from kvnotes.session.reply import Reply, told
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
        self._exchange: Exchange | None = None
        self._watch = Stopwatch()
        self._pieces = self._generated(talk, params, new_id)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here; what was generated is kept."""
        self._pieces.close()

    @property
    def turn(self) -> Turn:
        """What was reused, moved and computed before the first piece.

        A server says what it had cached at the end.

        Raises:
            EngineError: Nothing was asked for yet.
        """
        if self._turn is None:
            raise EngineError("the stream has not begun", hint="read its turn after its text")
        return told(self._turn, self._exchange, self._watch)

    def _generated(
        self, talk: Conversation, params: SamplingParams, new_id: Callable[[], str]
    ) -> Generator[str, None, None]:
        self._watch = Stopwatch()
        with talk.undone_on_error():
            reserve = params.max_new_tokens
            execution, prompt, self._turn = talk.run((), None, self._watch, reserve=reserve)
            self._exchange = execution.exchange
            answer = Reply(talk.model, execution, params)
            del execution
            with closing(answer), suppress(GeneratorExit):
                yield from answer
            talk.keep_reply(prompt, answer.message(new_id()), answer.cache)
