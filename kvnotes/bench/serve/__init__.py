"""Online: what edits of a long prompt cost a vLLM server under load, and what it then answers.

prompts   the arms: one question about one value, laid out in several ways; what can be cached
load      requests at given times, and when their tokens came
server    what is asked of a server beside that: its model, counters, segments, decisions
measure   every arm at every rate, in turn
report    tables and plots of it
"""

from __future__ import annotations

from kvnotes.bench.serve.measure import Target, run
from kvnotes.bench.serve.options import ServeOptions

__all__ = ["ServeOptions", "Target", "run"]
