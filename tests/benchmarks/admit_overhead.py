"""What `opdcheck admit` costs above the bare work: engine start, generation and one plain scoring pass.

    python tests/benchmarks/admit_overhead.py [--candidate examples/smollm2/bf16.yaml] [--repeat 3]

Both sides run in fresh processes, in turn, on the same prompts and sampling; the best of each is compared. The bare
side is a script as one would write it by hand: vLLM started with the candidate's arguments, one `generate` call for all
prompts, then the student in Transformers and the full logits of each completion. `admit` runs with `--fresh` and warm
fingerprints, so it starts, samples and scores as well. Exits 1 above 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", type=Path, default=Path("examples/smollm2/bf16.yaml"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bare", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        bare(options.candidate, options.bare)
        return 0
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # for both sides alike
    admit(options.candidate)  # warms fingerprints, the page cache and compiled files
    admitted, by_hand = [], []
    for _ in range(options.repeat):
        seconds, rows = admit(options.candidate)
        admitted.append(seconds)
        by_hand.append(timed([sys.executable, __file__, "--candidate", options.candidate, "--bare", rows]))
        print(f"admit {admitted[-1]:6.1f} s   bare {by_hand[-1]:6.1f} s   {len(rows)} prompts", flush=True)
    ratio = min(admitted) / min(by_hand)
    print(f"ratio of the best: {ratio:.2f} ({'within' if ratio <= LIMIT else 'ABOVE'} {LIMIT})")
    return int(ratio > LIMIT)


def timed(command: list[object]) -> float:
    start = time.perf_counter()
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return time.perf_counter() - start


def admit(candidate: Path) -> tuple[float, list[int]]:
    """Seconds, and which rows of the prompt file were measured."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        seconds = timed([sys.executable, "-m", "opdcheck", "admit", candidate, "--fresh", "--json", report])
        return seconds, json.loads(report.read_text())["measurement"]["prompt_rows"]


def bare(candidate_file: Path, measured: list[int]) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CONFIGURE_LOGGING="0")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from opdcheck.config import load_candidate, resolve

    located = load_candidate(candidate_file)
    candidate, base = located.value, located.path.parent
    student = str(resolve(candidate.student.path, base))
    tokenizer = AutoTokenizer.from_pretrained(student)
    lines = resolve(candidate.workload.prompts, base).read_text().splitlines()
    ids = [
        tokenizer.apply_chat_template(json.loads(lines[row])["messages"], add_generation_prompt=True, return_dict=False)
        for row in measured
    ]
    llm = LLM(student, dtype=candidate.rollout.dtype, **candidate.rollout.engine_args)
    length = candidate.workload.max_completion_length
    params = [SamplingParams(max_tokens=length, logprobs=candidate.rollout.logprobs, seed=i) for i in range(len(ids))]
    with torch.compiler.set_stance("force_eager"):
        outputs = llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=getattr(torch, candidate.student.dtype))
    with torch.inference_mode():
        for output in outputs:
            tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
            logp = model(tokens).logits[:, :-1].float().log_softmax(-1)
            logp.gather(-1, tokens[:, 1:, None])
    os._exit(0)  # not the engine's shutdown, which is not part of the sum


if __name__ == "__main__":
    sys.exit(main())
