"""Characters of other people's text that would be obeyed instead of shown: by a terminal, or by a page's layout."""

from __future__ import annotations

import re

# Controls but tab and line break (ESC starts a terminal's commands), marks and overrides of the writing direction (a
# line can read differently from what it says), and halves of characters, which no file can hold.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with these characters as a programmer writes them, such as `\\x1b`: for terminals."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def replaced(text: str) -> str:
    """`text` with U+FFFD in their place: for Markdown, where a backslash has another meaning."""
    return _OBEYED.sub("\ufffd", text)
