"""Sessions: live conversations whose fields are edited and whose segments are spliced."""

from kvnotes.session.book import SegmentBook
from kvnotes.session.loaded import Model, load
from kvnotes.session.report import Comparison, Decision, Evidence, Turn, Verification
from kvnotes.session.session import Session
from kvnotes.session.strategy import Scorecard
from kvnotes.session.together import generate_together

__all__ = [
    "Comparison",
    "Decision",
    "Evidence",
    "Model",
    "Scorecard",
    "SegmentBook",
    "Session",
    "Turn",
    "Verification",
    "generate_together",
    "load",
]
