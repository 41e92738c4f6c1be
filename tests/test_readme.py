"""README is true: its reference table is the configuration's own, its budget is the shipped one, its links exist.

`python tests/test_readme.py` prints the table, to paste it after a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opdcheck.cli.schema import candidate_schema

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One table row per key, nested keys with their path."""
    for name, field in schema["properties"].items():
        section = referenced(field, definitions)
        if section is not None and name not in ("quantization", "model", "teacher"):
            yield from rows(section, definitions, f"{prefix}{name}.")
            continue
        default = "required" if name in schema.get("required", []) else show(field.get("default"))
        text = " ".join(field.get("description", (section or {}).get("description", "")).split())
        yield f"| `{prefix}{name}` | {default} | {text} |"


def referenced(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    options = [field, *field.get("anyOf", [])]
    found = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    section = definitions[found[0]] if found else None
    return section if section and "properties" in section else None


def show(default: object) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def candidate_table() -> str:
    schema = candidate_schema()
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows(schema, schema["$defs"])])


def test_the_candidate_reference_is_the_schema():
    assert candidate_table() in README


def test_the_budget_shown_is_the_shipped_one():
    assert (ROOT / "budgets" / "smollm2-135m.yaml").read_text().strip() in README


def test_links_lead_somewhere():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


if __name__ == "__main__":
    print(candidate_table())  # noqa: T201
