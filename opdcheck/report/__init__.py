"""One record, many faces: terminal, JSON and Markdown show the same verdict. Nothing is measured or decided here."""
