"""Whether a completion's answer is right: a regular expression against the prompt file's own answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdcheck.calibration.file import Verifier
from opdcheck.config import resolve
from opdcheck.errors import ConfigError
from opdcheck.rollouts import Rollout
from opdcheck.workload import jsonl_rows, parquet_rows


class AnswerChecker:
    """Scores completions 1 (the answer is the row's) or 0.

    Args:
        verifier: pattern, and the key of the answers.
        answers: prompt index -> right answer.
        tokenizer: decodes completions, special tokens left out.
    """

    def __init__(self, verifier: Verifier, answers: Mapping[int, str], tokenizer: Any) -> None:
        self._pattern = re.compile(verifier.pattern)
        self._answers = answers
        self._tokenizer = tokenizer

    def scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One score per rollout, in their order."""
        texts = self._tokenizer.batch_decode([r.token_ids.tolist() for r in rollouts], skip_special_tokens=True)
        return [float(self._right(text, rollout.prompt.index)) for text, rollout in zip(texts, rollouts, strict=True)]

    def _right(self, text: str, prompt: int) -> bool:
        found = self._pattern.findall(text)
        return bool(found) and found[-1].strip() == self._answers[prompt]


def load_answers(prompts: str, key: str, base: Path, count: int | None) -> dict[int, str]:
    """The right answers of a prompt file's first `count` rows: row index -> text.

    Raises:
        ConfigError: at the first row without one, as `FILE:LINE: ...`.
    """
    path = resolve(prompts, base)
    rows = parquet_rows(path, (key,)) if path.suffix.lower() == ".parquet" else jsonl_rows(path)
    answers: dict[int, str] = {}
    for index, row in enumerate(rows):
        if count is not None and index >= count:
            break
        answer = row.content.get(key) if isinstance(row.content, dict) else None
        if not isinstance(answer, str | int) or isinstance(answer, bool) or str(answer).strip() == "":
            raise ConfigError(f"{row.where}: expected the right answer (text or a whole number) in `{key}`")
        answers[index] = str(answer).strip()
    return answers


__all__ = ["AnswerChecker", "load_answers"]
