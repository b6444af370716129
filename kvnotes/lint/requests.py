"""Requests to a chat API as texts: what of them a model reads, in the order it reads it.

Owns the shapes of requests that are understood. Does not read files, and does not render chat
templates: tools come first and then the messages, as most templates and services have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvnotes.errors import InputError
from kvnotes.lint.text import Part

PROMPT = "prompt"
"""Role of the only message of a request that is one text."""

_WRAPPERS = ("body", "request", "params", "kwargs")
_INSTRUCTING = ("system", "developer", PROMPT)
_SHAPES = 'a request is {"messages": [...]}, {"prompt": "..."} or a JSON string'


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call: its name, and its schema as it was written."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its role and all that the model reads of it."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        tools: In their order.
        messages: In their order; a request that is one text has one message of role `prompt`.
    """

    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything the model reads, in order.

        Tools, instructions and the first user message, where clients put context, are written
        anew for each request; what follows is history.
        """
        roles = [message.role for message in self.messages]
        first_user = roles.index("user") if "user" in roles else -1
        tools = (Part(tool.text, f"tools[{i}] {tool.name}") for i, tool in enumerate(self.tools))
        messages = (
            Part(
                message.text,
                message_name(i, message),
                is_history=message.role not in _INSTRUCTING and i != first_user,
            )
            for i, message in enumerate(self.messages)
        )
        return (*tools, *messages)


def message_name(index: int, message: Message) -> str:
    """Return what to call a message."""
    return PROMPT if message.role == PROMPT else f"messages[{index}] {message.role}"


def looks_like_request(data: object) -> bool:
    """Whether JSON data has the outer shape of a request."""
    return isinstance(data, Mapping) and any(
        key in data for key in ("messages", "prompt", "input", *_WRAPPERS)
    )


def parse_request(data: object) -> Request:
    """Return the request that JSON data holds.

    Args:
        data: A chat request, a completion request, the text of a prompt, or one of these under
            a key such as `body`.

    Raises:
        InputError: It is none of these.
    """
    if isinstance(data, str):
        return Request((), (Message(PROMPT, data),))
    if not isinstance(data, Mapping):
        raise InputError(f"{_kind(data)} where a request should stand", hint=_SHAPES)
    if not any(key in data for key in ("messages", "prompt", "input")):
        inner = next((data[key] for key in _WRAPPERS if isinstance(data.get(key), Mapping)), None)
        if inner is not None and inner is not data:
            return parse_request(inner)
        raise InputError("an object without messages or prompt", hint=_SHAPES)
    tools = _tools(data.get("tools") or data.get("functions") or ())
    instructions = data.get("system") or data.get("instructions")
    system = (Message("system", _content(instructions)),) if instructions else ()
    if "messages" in data or "input" in data:
        key = "messages" if "messages" in data else "input"
        return Request(tools, (*system, *_messages(data[key], key)))
    return Request(tools, (*system, Message(PROMPT, _prompt(data["prompt"]))))


def _prompt(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(part, str) for part in prompt):
        return "\n".join(prompt)
    raise InputError(f"the prompt is {_kind(prompt)}, not a text", hint=_SHAPES)


def _messages(messages: object, key: str) -> tuple[Message, ...]:
    if isinstance(messages, str):
        return (Message("user", messages),)
    if not isinstance(messages, Sequence):
        raise InputError(f"{key!r} is {_kind(messages)}, not a list", hint=_SHAPES)
    return tuple(_message(message, f"{key}[{i}]") for i, message in enumerate(messages))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(
            f"{where} is {_kind(message)}, not a message",
            hint='a message is {"role": "user", "content": "..."}',
        )
    role = message.get("role") or message.get("type") or "message"
    parts = [_content(message.get("content"))]
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            parts.append(_dumped(message[key]))
    if not any(parts) and "role" not in message:
        parts = [_dumped(message)]
    return Message(str(role), "\n".join(part for part in parts if part))


def _content(content: object) -> str:
    """Return a message's content as text; a picture or file stays JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_block(block) for block in content)
    return _dumped(content)


def _block(block: object) -> str:
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    return block if isinstance(block, str) else _dumped(block)


def _tools(tools: object) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InputError(f"'tools' is {_kind(tools)}, not a list", hint=_SHAPES)
    return tuple(Tool(_tool_name(tool), _dumped(tool)) for tool in tools)


def _tool_name(tool: object) -> str:
    if not isinstance(tool, Mapping):
        return "?"
    function = tool.get("function")
    holder = function if isinstance(function, Mapping) else tool
    return str(holder.get("name") or tool.get("type") or "?")


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Sequence):
        return "a list"
    return json.dumps(value, default=str)[:40]
