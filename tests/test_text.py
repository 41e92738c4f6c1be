"""What a terminal or a page would obey is shown; all other text stays as it is."""

import pytest

from opdcheck.text import escaped, replaced


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x00\x07", r"a\rb\x00\x07"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_what_would_be_obeyed(text, shown):
    assert escaped(text) == shown
    assert "\ufffd" in replaced(text)
    assert len(replaced(text)) == len(text)


@pytest.mark.parametrize("text", ["plain\ttext\nin two lines", "日本 ½ é – 🙂‍↔️ العربية"])
def test_other_text_stays(text):
    assert escaped(text) == replaced(text) == text
