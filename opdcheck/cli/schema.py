"""`opdcheck schema`: the JSON schema of the files, so that editors complete and check them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    budget: Annotated[
        bool, typer.Option("--budget", help="The budget file's schema instead of the candidate's.")
    ] = False,
) -> None:
    """Print the JSON schema of the candidate file.

    For completion in an editor: `opdcheck schema > candidate.schema.json`, and as the file's first line
    `# yaml-language-server: $schema=candidate.schema.json`.
    """
    typer.echo(json.dumps(budget_schema() if budget else candidate_schema(), indent=2, ensure_ascii=False))


def candidate_schema() -> dict[str, Any]:
    """JSON schema of `opdcheck.config.Candidate`."""
    from opdcheck.config import Candidate

    return {"$schema": DIALECT, **Candidate.model_json_schema(), "title": "opdcheck candidate"}


def budget_schema() -> dict[str, Any]:
    """JSON schema of `opdcheck.budget.Budget`."""
    from opdcheck.budget import Budget

    return {"$schema": DIALECT, **Budget.model_json_schema(), "title": "opdcheck budget"}
