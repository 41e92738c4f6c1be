"""`budget show` and `budget verify`."""

import io

import pytest
from inline_snapshot import snapshot
from rich.console import Console
from samples import ENVIRONMENT, STUDENT, budget

from opdcheck.cli import budget_show


def printed(call, *arguments, width=80):
    buffer = io.StringIO()
    result = call(*arguments, Console(file=buffer, width=width, no_color=True, highlight=False))
    return result, buffer.getvalue()


def test_show():
    full = budget(
        teacher=STUDENT.model_copy(update={"name": "teachers/large"}),
        declared_by="A Team",
        method={
            "learning_rate": 1e-5,
            "steps": 100,
            "batch_size": 16,
            "temperature": 1,
            "max_completion_length": 512,
        },
        limits={
            "total": {"tv": 0.05, "k3": 0.001},
            "per_source": {"kv_cache": {"tv": 0.03}},
            "prefix_shift": 0.02,
            "tails": {"k3": {"p99_9": 2}},
        },
    )
    assert printed(budget_show.show, full)[1] == snapshot("""\
smollm2-demo  declared budget of 2026-12-01
  declared by  A Team
  reason       prime-rl's acceptance rule for new models
  method       opd, beta 1, learning rate 1e-05 (constant), 100 steps of 16
               completions, temperature 1, at most 512 tokens

Limits  of the mean over tokens and prompts
  total.tv                0.05
  total.k3                0.001 nats/token
  per_source.kv_cache.tv  0.03
  prefix_shift            0.02 nats/token
  tails.k3.p99_9          2

Floor  16 prompts, 2,048 tokens
              kernel  trainer_null
  tv          0.0108        0.0061
  kl         0.00172       0.00051
  k3          0.0017       0.00049
  abs_dlogp   0.0313        0.0171

Made for
  student                         students/smollm2
  student.weights                 1a1a1a1a1a1a
  student.tokenizer               2b2b2b2b2b2b
  student.chat_template           3c3c3c3c3c3c
  teacher                         teachers/large
  teacher.weights                 1a1a1a1a1a1a
  teacher.tokenizer               2b2b2b2b2b2b
  teacher.chat_template           3c3c3c3c3c3c
  environment.engine              vllm
  environment.torch               2.13.0
  environment.transformers        5.19.0
  environment.vllm                0.32.0
  environment.compressed_tensors  0.17.0
  environment.device              cpu
  environment.trainer_dtype       bfloat16
  environment.python              3.11.9
  environment.cpu_capability      AVX512

Warnings
  !  limits.total.k3: 0.001 nats/token is below the kernel floor 0.0017
     nats/token: even the unperturbed student would be rejected
""")


def test_verify_valid():
    code, text = printed(budget_show.verify, budget(), STUDENT, None, ENVIRONMENT)
    assert code == 0
    assert text.splitlines()[:3] == snapshot(
        [
            "smollm2-demo  VALID here",
            "  ok  student.weights                 1a1a1a1a1a1a",
            "  ok  student.tokenizer               2b2b2b2b2b2b",
        ]
    )


def test_verify_changed():
    changed = STUDENT.model_copy(update={"weights": "blake3:" + "ff" * 32, "chat_template": None})
    code, text = printed(budget_show.verify, budget(), changed, None, ENVIRONMENT)
    assert code == 3
    assert text == snapshot("""\
smollm2-demo  NOT VALID here
  changed  student.weights                 1a1a1a1a1a1a -> ffffffffffff
  ok       student.tokenizer               2b2b2b2b2b2b
  changed  student.chat_template           3c3c3c3c3c3c -> none
  ok       teacher                         none
  ok       environment.engine              vllm
  ok       environment.torch               2.13.0
  ok       environment.transformers        5.19.0
  ok       environment.vllm                0.32.0
  ok       environment.compressed_tensors  0.17.0
  ok       environment.device              cpu
  ok       environment.trainer_dtype       bfloat16
  Make a budget for what is there now: `opdcheck budget declare`.
""")


@pytest.mark.parametrize("width", [40, 60, 120])
def test_fits(width):
    for call, arguments in ((budget_show.show, ()), (budget_show.verify, (STUDENT, None, ENVIRONMENT))):
        _, text = printed(call, budget(), *arguments, width=width)
        assert max(map(len, text.splitlines())) <= width
