"""Trains the teacher and the student of the addition pair, and writes their prompts.

    python train_pair.py   # three minutes on two cores; writes teacher/, student/, train.jsonl, held_out.jsonl

The task is column addition, written out from the last column to the first with its carry:

    437+185=7+5+0=12;8+3+1=12;4+1+1=06;0622

Either digit of a column may come first, so that a policy has something to choose. Both models are Llama-shaped (so
Transformers and vLLM load them), with one token per character. The teacher is trained until it hardly errs; the student
is smaller and is stopped early, so that there is something left to distil. Training here is supervised, on random sums:
`opdcheck calibrate` does the on-policy part.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
DIGITS = 3
SYMBOLS = ["<pad>", "<end>", *"0123456789", "+", "=", ";"]
PAD, END = 0, 1

SHAPES = {
    "teacher": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    "student": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 192},
}


def problem(rng: random.Random) -> tuple[str, str, str]:
    """Prompt, completion and answer of a random sum."""
    first, second = rng.randrange(10**DIGITS), rng.randrange(10**DIGITS)
    columns, carry = [], 0
    for a, b in zip(reversed(f"{first:0{DIGITS}d}"), reversed(f"{second:0{DIGITS}d}"), strict=True):
        total = int(a) + int(b) + carry
        if rng.random() < 0.5:
            a, b = b, a
        columns.append(f"{a}+{b}+{carry}={total:02d}")
        carry = total // 10
    answer = f"{first + second:0{DIGITS + 1}d}"
    return f"{first:0{DIGITS}d}+{second:0{DIGITS}d}=", ";".join(columns) + f";{answer}", answer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_model(name: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        max_position_embeddings=64,
        num_key_value_heads=SHAPES[name]["num_attention_heads"],
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


def train(name: str, steps: int, seed: int) -> LlamaForCausalLM:
    """Supervised training on fresh random sums; the loss is on completions only."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    ids = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    model = make_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        rows = [problem(rng) for _ in range(64)]
        tokens = torch.tensor([[*(ids[c] for c in prompt + completion), END] for prompt, completion, _ in rows])
        labels = tokens.clone()
        labels[:, : len(rows[0][0])] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            print(f"{name}: step {step + 1}/{steps}, loss {loss.item():.4f}", flush=True)
    return model.eval()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def write_prompts(path: Path, count: int, seed: int, without: set[str] | None = None) -> set[str]:
    """Different prompts, none of those in `without`, with the answers that the verifier compares with."""
    rng = random.Random(seed)
    seen: set[str] = set()
    rows = []
    while len(rows) < count:
        prompt, _, answer = problem(rng)
        if prompt not in seen and prompt not in (without or ()):
            seen.add(prompt)
            rows.append({"prompt": prompt, "answer": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--teacher-steps", type=int, default=700)
    parser.add_argument("--student-steps", type=int, default=380)
    arguments = parser.parse_args()
    trained_on = write_prompts(arguments.out / "train.jsonl", 1024, seed=1)
    write_prompts(arguments.out / "held_out.jsonl", 2048, seed=2, without=trained_on)
    save(train("student", arguments.student_steps, seed=2), arguments.out / "student")
    save(train("teacher", arguments.teacher_steps, seed=1), arguments.out / "teacher")


if __name__ == "__main__":
    main()
