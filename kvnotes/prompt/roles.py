"""The roles of messages."""

from __future__ import annotations

from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
