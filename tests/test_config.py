"""The candidate file: what may stand in it, and how its mistakes are told."""

import re
from pathlib import Path
from typing import get_args

import pytest
from inline_snapshot import snapshot
from pydantic import ValidationError

from opdcheck.budget import load_budget
from opdcheck.config import (
    FIXED_ARGS,
    OWN_KEYS,
    PRESET_SCHEMES,
    TOKENIZATION_ARGS,
    Candidate,
    KVCacheDType,
    ModelRef,
    Quantization,
    Rollout,
    is_local,
    load_candidate,
    override,
    resolve,
)
from opdcheck.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent / "examples" / "smollm2"
HEAD = "student: {path: student}\nworkload: {prompts: prompts.jsonl}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with a student, prompts and a budget, all empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text("{}")
    (tmp_path / "budget.yaml").write_text("{}")
    return tmp_path


@pytest.fixture
def loaded(folder):  # noqa: ARG001
    """Loads a candidate given as text, beside the files of `folder`."""

    def load(text, overrides=None, **options):
        path = Path("c.yaml")
        path.write_text(text)
        return load_candidate(path, overrides, **options)

    return load


@pytest.fixture
def complaint(loaded, folder):
    """The message that loading a text gives, with short paths in it."""

    def message(text, overrides=None, **options):
        with pytest.raises(ConfigError) as caught:
            loaded(text, overrides, **options)
        return caught.value.message.replace(str(folder), "FOLDER")

    return message


def test_smallest_candidate_has_the_defaults_of_the_design(loaded):
    candidate = loaded(HEAD + "rollout: {}\n").value
    assert candidate.rollout.engine == "vllm"
    assert candidate.rollout.sampling.temperature == candidate.rollout.sampling.top_p == 1
    assert not candidate.rollout.sampling.truncates
    assert candidate.decision.alpha == 0.05
    assert candidate.student.dtype == candidate.rollout.dtype == "bfloat16"


def test_three_forms_of_quantization(loaded):
    def quantization(text):
        return loaded(f"{HEAD}rollout:\n  quantization: {text}\n").value.rollout.quantization

    assert quantization("fp8_dynamic") == "FP8_DYNAMIC"
    assert quantization("{scheme: w4a16, group_size: 64}") == Quantization(scheme="W4A16", group_size=64)
    full = quantization("{config_groups: {W8A8: [Linear]}, ignore: [lm_head]}")
    assert full == {"config_groups": {"W8A8": ["Linear"]}, "ignore": ["lm_head"]}
    assert quantization("null") is None


def test_quantization_is_told_in_one_sentence_for_the_form_that_was_meant(complaint):
    def message(text):
        return complaint(f"{HEAD}rollout:\n  quantization: {text}\n")

    assert message("8") == snapshot(
        "c.yaml:4: rollout.quantization: expected a scheme name, or a mapping with `scheme` or `config_groups`, found 8"
    )
    assert message("[W8A8]").endswith("found a list of 1")
    assert message("FP8_DYNAMC") == snapshot(
        "c.yaml:4: rollout.quantization: expected one of `UNQUANTIZED`, `W8A16`, `W4A16`, `W4A16_ASYM`, `W8A8`, `INT8`,"
        " `W4A8`, `W4AFP8`, `FP8`, `FP8_DYNAMIC`, `FP8_BLOCK`, `NVFP4A16`, `NVFP4`, `MXFP4A16`, `MXFP4`, `MXFP8A16`,"
        " `MXFP8`; found the text 'FP8_DYNAMC' (did you mean `FP8_DYNAMIC`?)"
    )
    assert message("{scheme: FP8, target: [Linear]}") == snapshot(
        "c.yaml:4: rollout.quantization.target: unknown key; did you mean `targets`?"
    )
    assert message("{scheme: FP8, targets: Linear}") == snapshot(
        "c.yaml:4: rollout.quantization.targets: expected a list, found the text 'Linear'"
    )
    assert message("{targets: [Linear]}").startswith("c.yaml:4: rollout.quantization.scheme: required, but missing")
    assert message("{config_groups: []}") == snapshot(
        "c.yaml:4: rollout.quantization: expected `config_groups` to map group names to schemes, as in"
        " compressed-tensors"
    )


def test_wrong_values_all_at_once(complaint):
    text = """\
student: {path: student, dtype: bf16, device: gpu}
workload: {prompts: prompts.jsonl, num_prompts: "8"}
rollout:
  engin: vllm
  kv_cache_dtype: fp8_e4m
  kv_cache_dtype_skip_layers: [0, 2, 0]
  sampling: {temperature: 0, top_p: .nan}
  noise: {weights: -0.1, logits: .inf}
  logprobs: true
decision: {alpha: 1, min_prompts: 1}
temperature: 1
"""
    assert complaint(text) == snapshot("""\
c.yaml:1: student.dtype: expected one of `bfloat16`, `float16`, `float32`; found the text 'bf16' (did you mean `bfloat16`?)
c.yaml:1: student.device: expected `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`, found the text 'gpu'
c.yaml:2: workload.num_prompts: expected a whole number, found the text '8'; take the quotes away
c.yaml:4: rollout.engin: unknown key; did you mean `engine`?
c.yaml:5: rollout.kv_cache_dtype: expected one of `auto`, `float16`, `bfloat16`, `fp8`, `fp8_e4m3`, `fp8_e5m2`, `fp8_inc`, `fp8_ds_mla`, `nvfp4_ds_mla`, `turboquant_k8v4`, `turboquant_4bit_nc`, `turboquant_k3v4_nc`, `turboquant_3bit_nc`, `ultraquant_4bit`, `int4_per_token_head`, `int8_per_token_head`, `fp8_per_token_head`, `nvfp4`, `nvfp4_4over6`; found the text 'fp8_e4m' (did you mean `fp8_e4m3`?)
c.yaml:6: rollout.kv_cache_dtype_skip_layers: expected each layer once, found 0 twice
c.yaml:7: rollout.sampling.temperature: expected a number above 0, found 0
c.yaml:7: rollout.sampling.top_p: expected a finite number, found nan
c.yaml:8: rollout.noise.weights: expected a number of at least 0, found -0.1
c.yaml:8: rollout.noise.logits: expected a finite number, found inf
c.yaml:9: rollout.logprobs: expected a whole number, found true
c.yaml:10: decision.alpha: expected a number below 1, found 1
c.yaml:10: decision.min_prompts: expected a number of at least 2, found 1
c.yaml:11: temperature: unknown key here; did you mean `rollout.sampling.temperature`?\
""")  # noqa: E501


def test_rules_between_keys_for_vllm(complaint):
    text = f"""{HEAD}rollout:
  noise: {{logits: 0.1}}
  quantization: W8A8
  engine_args:
    seed: 1
    kv-cache-dtype: fp8
    quantization: fp8
    logprobs_mode: raw_logprobs
    max_model_len: 1024
  model: {{path: student}}
  staleness: {{checkpoint: student}}
decision: {{max_prompts: 4}}
"""
    assert complaint(text) == snapshot("""\
c.yaml:4: rollout.noise.logits: only `engine: transformers` can put noise on logits
c.yaml:7: rollout.engine_args.seed: the candidate file has its own key for it: workload.seed
c.yaml:8: rollout.engine_args.kv-cache-dtype: the candidate file has its own key for it: rollout.kv_cache_dtype
c.yaml:9: rollout.engine_args.quantization: `rollout.quantization` is set as well; use one of the two
c.yaml:10: rollout.engine_args.logprobs_mode: cannot be set: it must describe the distribution that was sampled from
c.yaml:13: rollout.staleness: `rollout.model` names the weights to sample from already; use one of the two
c.yaml:14: decision.max_prompts: expected at least decision.min_prompts (8), found 4\
""")


def test_engine_args_may_quantize_when_nothing_else_does(loaded):
    found = loaded(f"{HEAD}rollout: {{engine_args: {{quantization: fp8_per_block}}}}\n")
    assert found.value.rollout.engine_args == {"quantization": "fp8_per_block"}


def test_rules_between_keys_for_transformers(complaint):
    text = f"""{HEAD}rollout:
  engine: transformers
  simulate: true
  logprobs: 20
  engine_args: {{max_model_len: 9}}
  noise: {{logits: 0.1}}
"""
    assert complaint(text) == snapshot("""\
c.yaml:5: rollout.simulate: only for `engine: vllm`; `engine: transformers` simulates quantization always
c.yaml:6: rollout.logprobs: only for `engine: vllm`; `engine: transformers` gives the whole distribution
c.yaml:7: rollout.engine_args: only for `engine: vllm`, whose arguments these are\
""")


def test_fewer_prompts_than_a_verdict_takes_and_chat_template_arguments(complaint):
    text = """\
student: {path: student}
rollout: {}
workload:
  prompts: prompts.jsonl
  num_prompts: 4
  chat_template_kwargs: {enable_thinking: false, truncation: true}
"""
    assert complaint(text) == snapshot("""\
c.yaml:5: workload.num_prompts: expected at least decision.min_prompts (8), found 4: there could be no verdict
c.yaml:6: workload.chat_template_kwargs.truncation: cannot be set: opdcheck decides how prompts are tokenized\
""")


def test_files_must_exist(complaint, folder):
    (folder / "empty").mkdir()
    text = """\
student: {path: ./studnt}
teacher: {path: prompts.jsonl}
rollout:
  model: {path: a/b/c}
workload: {prompts: prompt.jsonl}
budget: student
"""
    assert complaint(text) == snapshot("""\
c.yaml:1: student.path: no such folder: FOLDER/studnt
c.yaml:2: teacher.path: expected a model folder (config.json and safetensors), found a file: FOLDER/prompts.jsonl
c.yaml:4: rollout.model.path: no such folder, and no hub id (`owner/name`) either: a/b/c
c.yaml:5: workload.prompts: no such file: FOLDER/prompt.jsonl (did you mean `prompts.jsonl`?)
c.yaml:6: budget: expected a file, found a folder: FOLDER/student\
""")
    text = """\
student: {path: empty}
teacher: {path: student, revision: main}
rollout:
  staleness: {checkpoint: "~no-such-user/x"}
workload: {prompts: budget.yaml}
budget: nope.yaml
"""
    assert complaint(text, budget_must_exist=False) == snapshot("""\
c.yaml:1: student.path: no config.json in this folder, so it holds no model: FOLDER/empty
c.yaml:2: teacher.revision: only for a hub id; `path` is a folder on disk
c.yaml:4: rollout.staleness.checkpoint: not a usable path: '~no-such-user/x': Could not determine home directory.
c.yaml:5: workload.prompts: expected a file that ends in .jsonl or .ndjson or .parquet, found budget.yaml\
""")


def test_hub_ids_pass_without_a_look_at_the_hub(loaded):
    found = loaded(
        "student: {path: owner/Model-1.5, revision: main}\nworkload: {prompts: prompts.jsonl}\nrollout: {}\n"
    )
    assert found.value.student.path == "owner/Model-1.5"


def test_paths_are_relative_to_the_file(folder, monkeypatch):
    (folder / "deep").mkdir()
    path = folder / "deep" / "c.yaml"
    path.write_text("student: {path: ../student}\nworkload: {prompts: ../prompts.jsonl}\nrollout: {}\n")
    monkeypatch.chdir("/")
    assert load_candidate(path).value.workload.prompts == "../prompts.jsonl"
    assert resolve("../student", path.parent) == folder / "student"
    assert resolve("~/x", path.parent) == Path.home() / "x"
    assert is_local("student", folder)
    assert not is_local("owner/student", folder)
    assert is_local("~/x", folder)


def test_flags_come_before_the_file(loaded):
    found = loaded(HEAD + "rollout: {}\nbudget: nope.yaml\n", {"decision.alpha": 0.2, "budget": Path("budget.yaml")})
    assert found.value.decision.alpha == 0.2
    assert found.value.budget == str(Path("budget.yaml").absolute()), "a flag's path starts from the current folder"
    again = override(found, {"workload.num_prompts": 9, "decision.metric": None})
    assert (again.value.workload.num_prompts, again.value.decision.alpha) == (9, 0.2)
    assert again.error("decision.alpha", "x").message == "--alpha: x"


def test_a_flag_can_add_a_section_that_the_file_lacks(loaded):
    found = loaded(HEAD + "rollout: {}\n", {"rollout.noise.weights": 0.5})
    assert found.value.rollout.noise is not None
    assert found.value.rollout.noise.weights == 0.5


def test_errors_name_the_flag(complaint):
    text = HEAD + "rollout: {}\n"
    assert complaint(text, {"decision.alpha": 2.0}) == "--alpha: expected a number below 1, found 2.0"
    assert complaint(text, {"decision.max_prompts": "9"}) == (
        "--max-prompts: expected a whole number, found the text '9'; take the quotes away"
    )
    flags = {"decision.alpha": "OPDCHECK_ALPHA"}
    assert complaint(text, {"decision.alpha": 0}, flags=flags) == "OPDCHECK_ALPHA: expected a number above 0, found 0"
    assert complaint(text + "decision: {min_prompts: 20}\n", {"decision.max_prompts": 9}) == (
        "--max-prompts: expected at least decision.min_prompts (20), found 9"
    )
    assert (
        complaint(text, {"budget": Path("nope.yaml")})
        == "--budget: no such file: FOLDER/nope.yaml; `opdcheck budget declare` or `calibrate` makes one"
    )


def test_an_override_keeps_what_was_left_to_defaults(loaded):
    found = loaded(HEAD + "rollout: {engine: transformers}\n", {"decision.alpha": 0.2})
    assert "logprobs" not in found.value.rollout.model_fields_set, "else the rule on logprobs would complain"


def test_python_callers_get_pydantics_checks():
    with pytest.raises(ValidationError):
        Rollout(quantization="FP9")
    assert Rollout(quantization=Quantization(scheme="fp8")).quantization == Quantization(scheme="FP8")
    assert ModelRef(path="a").revision is None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path, tmp_path):
    """Against a stand-in for the student, which only `make student` has."""
    text = path.read_text()
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text("{}")
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"~/\.cache/opdcheck/students/smollm2-135m-instruct", "./student", text))
    candidate = load_candidate(copy, budget_must_exist=False).value
    budget = load_budget(EXAMPLES / (candidate.budget or ""))
    assert budget.environment.engine == candidate.rollout.engine
    assert candidate.student.dtype == "bfloat16"


def test_scheme_names_are_the_librarys():
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES as library

    assert list(PRESET_SCHEMES) == list(library)


def test_names_are_vllms():
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    from vllm.config.cache import CacheDType

    assert get_args(KVCacheDType) == get_args(CacheDType)
    known = {*arguments.EngineArgs.__dataclass_fields__, "logits_processors"}
    assert set(OWN_KEYS) | set(FIXED_ARGS) <= known


def test_tokenization_arguments_are_transformers():
    import inspect

    from transformers import PreTrainedTokenizerBase

    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert parameters - {"self", "kwargs", "tools", "documents"} == set(TOKENIZATION_ARGS)


def test_every_field_of_the_candidate_is_frozen(loaded):
    candidate: Candidate = loaded(HEAD + "rollout: {}\n").value
    with pytest.raises(ValidationError):
        candidate.budget = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("sampling: {temperature: 0.009}", "rollout.sampling.temperature: expected at least 0.01 for `engine: vllm`"),
        ("sampling: {temperature: 0.000001}", "rollout.sampling.temperature: expected at least 0.01"),
        ("sampling: {top_k: 21}", "rollout.sampling.top_k: expected at most rollout.logprobs (20), found 21"),
        ("sampling: {top_k: 9}\n  logprobs: 8", "raise `rollout.logprobs` to 9"),
        ("sampling: {top_p: 0.9}\n  logprobs: 0", "rollout.sampling.top_p: needs `rollout.logprobs` of at least 1"),
        ("sampling: {min_p: 0.1}\n  logprobs: 0", "rollout.sampling.min_p: needs `rollout.logprobs` of at least 1"),
    ],
)
def test_sampling_that_vllm_would_change_or_hide(loaded, complaint, rollout, message):
    text = f"{HEAD}rollout:\n  {rollout}\n"
    assert message in complaint(text)
    assert complaint(text).startswith("c.yaml:4: rollout.sampling.")
    of_transformers = text.replace("rollout:\n", "rollout:\n  engine: transformers\n")
    loaded(re.sub(r"\n  logprobs: \d", "", of_transformers))


@pytest.mark.parametrize("rollout", ["sampling: {temperature: 0.01}", "sampling: {top_k: 20}", "sampling: {top_k: 0}"])
def test_sampling_that_vllm_takes_as_it_is(loaded, rollout):
    loaded(f"{HEAD}rollout:\n  {rollout}\n")
