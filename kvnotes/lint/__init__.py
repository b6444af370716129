"""The volatility lint: what in a prompt makes every prefix cache miss, and what to do about it.

Owns the search for values that change from request to request. Does not read files and knows
no tokenizer; whoever has one passes `count_tokens`.
"""

from kvnotes.lint.findings import CHANGES, KINDS, Change, Finding, Kind, advice_for, field_for
from kvnotes.lint.log import Cause, LogReport, Miss, lint_requests
from kvnotes.lint.requests import Message, Request, Tool, looks_like_request, parse_request
from kvnotes.lint.text import Part, Saving, best_saving, lint_parts, lint_text
from kvnotes.lint.tokens import CountTokens, OffsetCounter, num_tokens

__all__ = [
    "CHANGES",
    "KINDS",
    "Cause",
    "Change",
    "CountTokens",
    "Finding",
    "Kind",
    "LogReport",
    "Message",
    "Miss",
    "OffsetCounter",
    "Part",
    "Request",
    "Saving",
    "Tool",
    "advice_for",
    "best_saving",
    "field_for",
    "lint_parts",
    "lint_requests",
    "lint_text",
    "looks_like_request",
    "num_tokens",
    "parse_request",
]
