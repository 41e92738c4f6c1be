"""Where the addition pair stands."""

from pathlib import Path

ADDITION = Path(__file__).parents[2] / "examples" / "addition"
