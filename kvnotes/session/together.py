"""Several sessions that answer at once: each pass computes a token of every one of them.

What they share, a policy that all of them spliced, is read once for all. Each session's own
changes are computed first, one session after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvnotes.engine.base import SamplingParams, Stopwatch
from kvnotes.errors import EngineError
from kvnotes.session.reply import Reply, told
from kvnotes.session.report import Turn
from kvnotes.session.session import Session


def generate_together(
    sessions: Sequence[Session], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Turn]:
    """Generate the next message of several sessions in common passes.

    Every session gets the reply that it would get alone, to rounding. If one of them fails,
    none gets a message.

    Args:
        sessions: Different sessions of one loaded model.
        params: How tokens are chosen: for all, or one for each.

    Returns:
        A turn for each session, in order.

    Raises:
        EngineError: No sessions, one of them twice, of another model, or with an open stream.
    """
    own = _params(sessions, params)
    with ExitStack() as undo:
        begun = []
        for session, chosen in zip(sessions, own, strict=True):
            talk = session._talk
            undo.enter_context(talk.undone_on_error())
            watch, reserve = Stopwatch(), chosen.max_new_tokens
            execution, prompt, turn = talk.run((), None, watch, reserve=reserve)
            said = execution.exchange, watch
            begun.append((session, prompt, turn, Reply(session.model, execution, chosen), said))
            del execution
        replies = [reply for *_, reply, _ in begun]
        engine = sessions[0].model.engine
        for index, token_id in engine.together([reply.stream for reply in replies]):
            replies[index].push(token_id)
        turns = []
        for session, prompt, turn, reply, said in begun:
            reply.finish()
            session._talk.keep_reply(prompt, reply.message(session._new_id()), reply.cache)
            made = replace(turn, op="generate", text=reply.text, token_ids=reply.token_ids)
            turns.append(told(made, *said))
        return turns


def _params(
    sessions: Sequence[Session], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Check what is to be generated; return the parameters of each session."""
    if not sessions:
        raise EngineError("no sessions are given", hint="give at least one")
    if len({id(session._talk) for session in sessions}) != len(sessions):
        raise EngineError(
            f"{len(sessions)} sessions are given, one of them more than once",
            hint="fork it: a conversation has one next message",
        )
    if any(session.model.engine is not sessions[0].model.engine for session in sessions):
        raise EngineError(
            "the sessions are of different loaded models", hint="load one model for all of them"
        )
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(sessions)
    if len(params) != len(sessions):
        raise EngineError(
            f"{len(sessions)} sessions and {len(params)} parameters are given",
            hint="give one for each, or one for all",
        )
    return list(params)
