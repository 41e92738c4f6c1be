"""Peak memory of scoring above the decoder's hidden states, at a vocabulary of 262,144 and 4,096 tokens.

    python tests/benchmarks/scoring_memory.py [--hidden 64] [--tokens 4096] [--vocab 262144]

Each case runs in a process of its own, cold: the figure is the process's peak resident memory (VmHWM, reset when the
model and the hidden states are in memory) minus what was resident then. It holds everything: logits, temporaries, what
torch's kernels and libraries allocate inside. On a GPU: torch.cuda.max_memory_allocated, likewise.
Exits 1 above 128 MiB. All cases take about 15 minutes on 2 cores; the peak does not depend on --tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

LIMIT_MIB = 128
CASES = ("score", "score-top-20", "compare", "compare-top-p", "compare-noise")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    print(f"vocabulary {options.vocab}, {options.tokens} tokens, hidden size {options.hidden}; limit {LIMIT_MIB} MiB")
    worst = 0.0
    for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        for case in [options.case] if options.case else CASES:
            found = in_own_process(options, dtype, case)
            worst = max(worst, found["mib"])
            print(
                f"{dtype:9} {case:14} {found['mib']:7.1f} MiB  {found['seconds']:6.1f} s  ({found['how']})", flush=True
            )
    print(f"peak {worst:.1f} MiB: {'within' if worst < LIMIT_MIB else 'ABOVE'} the limit of {LIMIT_MIB} MiB")
    return int(worst >= LIMIT_MIB)


def in_own_process(options: argparse.Namespace, dtype: str, case: str) -> dict:
    sizes = [f"--{name}={getattr(options, name)}" for name in ("vocab", "tokens", "hidden")]
    command = [sys.executable, __file__, "--measure", f"--dtype={dtype}", f"--case={case}", *sizes]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict:
    import torch

    from opdcheck.scoring import Scorer

    model = wide_model(options)
    scorer = Scorer(model)
    rollouts = [long_rollout(options)]
    hidden = [torch.randn(options.tokens, options.hidden).to(model.dtype)]
    scorer.final_hidden = lambda _: hidden  # type: ignore[method-assign]  # the decoder is not what is measured
    meter = CudaMeter() if model.device.type == "cuda" else ResidentMeter()
    start = time.perf_counter()
    run_case(options.case, scorer, rollouts, hidden)
    return {"mib": meter.peak() / 2**20, "seconds": time.perf_counter() - start, "how": meter.how}


def run_case(case: str, scorer, rollouts, hidden) -> None:  # type: ignore[no-untyped-def]
    from opdcheck.config import Sampling

    top_p = Sampling(temperature=0.9, top_k=200, top_p=0.95)
    if case == "score":
        scorer.score(rollouts, Sampling(temperature=0.9))
    elif case == "score-top-20":
        scorer.score(rollouts, Sampling(temperature=0.9, top_k=20))
    else:
        policy = scorer.model.with_logit_noise(0.1, 0) if case == "compare-noise" else scorer.model
        sampling = top_p if case == "compare-top-p" else Sampling(temperature=0.9)
        scorer.compare(rollouts, hidden, hidden, policy.logits, sampling)


def wide_model(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """A Llama whose head is as wide as Gemma's and whose body is next to nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from opdcheck.models import CausalLM, resolve_device

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    device = resolve_device("auto")
    return CausalLM(LlamaForCausalLM(config).to(device, getattr(torch, options.dtype)).eval().requires_grad_(False))


def long_rollout(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import numpy as np

    from opdcheck.rollouts import Prompt, Rollout

    rng = np.random.default_rng(0)
    ids = rng.integers(0, options.vocab, options.tokens)
    top_ids = rng.integers(0, options.vocab, (options.tokens, 20))
    top_logq = np.full((options.tokens, 20), -np.log(20))
    return Rollout(Prompt(0, [1]), 0, ids, top_logq[:, 0], "length", top_ids, top_logq)


class ResidentMeter:
    """Peak resident memory since it was made (Linux)."""

    how = "peak resident memory"

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.start = self._kib("VmRSS")

    def peak(self) -> int:
        return (self._kib("VmHWM") - self.start) * 1024

    @staticmethod
    def _kib(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


class CudaMeter:
    """Peak allocated device memory since it was made."""

    how = "torch.cuda.max_memory_allocated"

    def __init__(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()
        self.start = torch.cuda.memory_allocated()

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() - self.start


if __name__ == "__main__":
    sys.exit(main())
