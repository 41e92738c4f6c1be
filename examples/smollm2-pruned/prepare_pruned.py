"""Makes the student of this pair: SmolLM2-135M without some of its layers. Its teacher is the whole model.

    python prepare_pruned.py          # reads ~/.cache/opdcheck/students/smollm2-135m-instruct (`make student`)
    python prepare_pruned.py --check  # exit 0 if the student is there, 1 if not

A model that has lost layers from its middle still speaks, and has something to learn from the whole one: what
distillation after pruning does in earnest.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

STUDENTS = Path("~/.cache/opdcheck/students").expanduser()
TEACHER = STUDENTS / "smollm2-135m-instruct"
STUDENT = STUDENTS / "smollm2-135m-pruned"
DROPPED = (12, 14, 16, 18, 20, 22)
"""Every second layer of the second third: neighbours are alike enough to stand in for each other."""


def prune(teacher: Path, student: Path, dropped: tuple[int, ...]) -> None:
    """Writes the teacher without some layers, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in dropped]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    partial = student.with_name(f".{student.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(partial)
    shutil.rmtree(student, ignore_errors=True)
    partial.rename(student)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if (STUDENT / "model.safetensors").is_file() else 1)
    if not (TEACHER / "model.safetensors").is_file():
        sys.exit(f"no teacher in {TEACHER}: run `make student` first")
    prune(TEACHER, STUDENT, DROPPED)
    print(f"Student: {STUDENT} ({30 - len(DROPPED)} of 30 layers)")


if __name__ == "__main__":
    main()
