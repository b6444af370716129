"""Print the retail policy and what its customers say: the text of `kvnotes bench --text`."""

from __future__ import annotations

from common import retail_text

print(retail_text())
