"""Prompts: templates with fields and segments, rendered to tokens and spans.

Owns everything about text, chat templates and tokenizers. Sees no tensors and no model.
"""

from kvnotes.prompt.arrange import Arranged, Part, arrange
from kvnotes.prompt.capabilities import TemplateCapabilities
from kvnotes.prompt.messages import ErratumStyle, Field, Message, SegmentText
from kvnotes.prompt.spans import Rewrite, SegmentSpan, Span, TokenizedPrompt
from kvnotes.prompt.stream import StreamDecoder
from kvnotes.prompt.template import PromptTemplate
from kvnotes.prompt.tokenizer import PromptTokenizer
from kvnotes.prompt.tools import tool_name, tool_segment, tool_text

__all__ = [
    "Arranged",
    "ErratumStyle",
    "Field",
    "Message",
    "Part",
    "PromptTemplate",
    "PromptTokenizer",
    "Rewrite",
    "SegmentSpan",
    "SegmentText",
    "Span",
    "StreamDecoder",
    "TemplateCapabilities",
    "TokenizedPrompt",
    "arrange",
    "tool_name",
    "tool_segment",
    "tool_text",
]
