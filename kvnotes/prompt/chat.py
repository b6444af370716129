"""Rendering of chat templates, with a frozen clock.

Owns the jinja environment. Behaves like transformers' own rendering, which cannot be used
here because its clock cannot be frozen. Does not know sentinels, spans or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvnotes.errors import TemplateError

ChatMessage = Mapping[str, str]

# What the code of a template can raise besides raise_exception().
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: The jinja source.
        variables: Special tokens by name (`bos_token`, ...), visible to the template.
        clock: Time that `strftime_now` shows; None freezes it at the first use.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], clock: datetime | None = None
    ) -> None:
        self.source = source
        self.clock = clock
        self._variables = dict(variables)
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = self._strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid jinja: {error.message} (line {error.lineno})",
                hint="pass a chat_template that transformers can render",
            ) from error

    @property
    def shows_time(self) -> bool:
        """Whether the template asks for the time."""
        return "strftime_now" in self.source

    def at(self, clock: datetime) -> ChatTemplate:
        """Return the same template with its clock frozen at a time."""
        return ChatTemplate(self.source, self._variables, clock)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """Render messages to text.

        Args:
            messages: Mappings with `role` and `content`.
            add_generation_prompt: Whether the header of the next assistant turn follows.

        Raises:
            TemplateError: The template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except _RENDER_ERRORS as error:
            roles = " ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template refuses the messages ({roles}): {error}",
                hint="see TemplateCapabilities of this tokenizer for the orders it takes",
            ) from error

    def try_render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render, or return None where the template refuses these messages."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            return None

    def _strftime_now(self, form: str) -> str:
        if self.clock is None:
            self.clock = datetime.now()
        return self.clock.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
