"""A teacher must speak the student's vocabulary: the divergence compares the two token by token."""

from __future__ import annotations

from typing import Any

from opdcheck.errors import ConfigError

SHOWN = 3


def check_same_vocabulary(student: Any, teacher: Any, student_size: int, teacher_size: int) -> None:
    """Compares two tokenizers token by token, and the widths of the two models' logits.

    Args:
        student, teacher: tokenizers (`transformers`).
        student_size, teacher_size: logits of each model, which may exceed the tokenizer's vocabulary.

    Raises:
        ConfigError: the vocabularies differ; names the first tokens that do.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: min(ours.get(token, 2**62), theirs.get(token, 2**62)),
    )
    if differing:
        listed = "".join(
            f"\n  {token!r}: student {ours.get(token, 'none')}, teacher {theirs.get(token, 'none')}"
            for token in differing[:SHOWN]
        )
        raise ConfigError(
            f"teacher: its vocabulary is not the student's: {len(differing):,} of {len(ours.keys() | theirs.keys()):,} "
            f"tokens differ (token: id){listed}",
            hint="On-policy distillation compares whole next-token distributions: take a teacher of the same family, "
            "with the same tokenizer.",
        )
    if student_size != teacher_size:
        raise ConfigError(
            f"teacher: its head gives {teacher_size:,} logits, the student's {student_size:,}, though the tokenizers "
            "agree",
            hint="One of the two pads its embedding; resize it (`resize_token_embeddings`) so that both are alike.",
        )


__all__ = ["check_same_vocabulary"]
