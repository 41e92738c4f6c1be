"""YAML files: every mistake is one line with file, line and key; nothing but `ConfigError` comes out."""

import math
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot
from pydantic import BaseModel, ConfigDict, Field

from opdcheck.config import Candidate
from opdcheck.errors import ConfigError
from opdcheck.yamlfile import MAX_BYTES, as_key, dump, load, load_located, show_key


class Limit(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    total: float = Field(ge=0)
    """Of the whole model."""
    layers: dict[str, float] = {}


class File(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    count: int = 1
    flag: bool = False
    scale: Literal["tv", "kl"] = "tv"
    limit: float | Limit = 0.1
    limits: list[Limit] = []
    pair: tuple[int, str] | None = None
    day: date | None = None


@pytest.fixture
def complaint(tmp_path, monkeypatch):
    """The message that loading a text gives, with a short file name in it."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(content: str | bytes, model: type[BaseModel] = File) -> str:
        path = Path("f.yaml")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as caught:
            load(path, model)
        assert caught.value.exit_code == 2
        return caught.value.message

    return write_and_load


def test_reads_values_strictly_and_positions(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(
        "\ufeff# comment\nname: a\nlimit: 1\nlimits:\n  - total: 2\n  - {total: 3}\npair: [4, b]\nday: 2026-01-31\n"
    )
    found = load_located(path, File)
    assert found.value == File(
        name="a", limit=1.0, limits=[Limit(total=2), Limit(total=3)], pair=(4, "b"), day=date(2026, 1, 31)
    )
    assert found.locate("name") == f"{path}:2"
    assert found.locate("limits[1].total") == f"{path}:6"
    assert found.locate("limits[1].layers.3") == f"{path}:6", "an absent key is where its parent is"
    assert found.locate("absent") == f"{path}:1"


def test_every_mistake_has_a_line_in_file_order(complaint):
    text = """\
nam: x
limits:
  - totl: 1
  - total: -2
  - total: .inf
    layers: {a: "3"}
count: "8"
flag: yes
scale: kk
"""
    assert complaint(text) == snapshot("""\
f.yaml:1: name: required, but missing
f.yaml:1: nam: unknown key; did you mean `name`?
f.yaml:3: limits[0].total: required, but missing (Of the whole model)
f.yaml:3: limits[0].totl: unknown key; did you mean `total`?
f.yaml:4: limits[1].total: expected a number of at least 0, found -2
f.yaml:6: limits[2].layers.a: expected a number, found the text '3'; take the quotes away
f.yaml:7: count: expected a whole number, found the text '8'; take the quotes away
f.yaml:8: flag: expected true or false, found the text 'yes'; write true
f.yaml:9: scale: expected one of `tv`, `kl`; found the text 'kk'\
""")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\nlimit: x",
            "f.yaml:2: limit: expected a number or a mapping (`key: value` lines), found the text 'x'",
        ),
        ("name: a\nlimit: {total: x}", "f.yaml:2: limit.total: expected a number, found the text 'x'"),
        (
            "name: a\nlimit:",
            "f.yaml:2: limit: expected a number or a mapping (`key: value` lines), found nothing (null)",
        ),
        ("name: 12", "f.yaml:1: name: expected text, found 12; put it in quotes to make it text"),
        ("name: a\ncount: true", "f.yaml:2: count: expected a whole number, found true"),
        ("name: a\ncount: 1.5", "f.yaml:2: count: expected a whole number, found 1.5"),
        ("name: a\nflag: 1", "f.yaml:2: flag: expected true or false, found 1; write true"),
        ("name: a\nlimits: {}", "f.yaml:2: limits: expected a list, found an empty mapping"),
        ("name: a\nlimits: [a]", "f.yaml:2: limits[0]: expected a mapping (`key: value` lines), found the text 'a'"),
        ("name: a\nlayers: {}", "f.yaml:2: layers: unknown key here; did you mean `limit.layers`?"),
        (
            "name: a\nzzz: {}",
            "f.yaml:2: zzz: unknown key; valid keys: name, count, flag, scale, limit, limits, pair, day",
        ),
        ("name: a\n5: {}", "f.yaml:2: 5: unknown key; valid keys: name, count, flag, scale, limit, limits, pair, day"),
    ],
)
def test_one_sentence_says_expected_and_found(complaint, text, message):
    assert complaint(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml:1: the file is empty; expected a mapping (`key: value` lines)"),
        ("# only a comment\n", "f.yaml:1: the file is empty; expected a mapping (`key: value` lines)"),
        ("- a\n- b\n", "f.yaml:1: expected a mapping (`key: value` lines), found a list"),
        ("hello", "f.yaml:1: expected a mapping (`key: value` lines), found a single value"),
        ("name: a\nname: b\n", "f.yaml:2: name: the key is given twice in this mapping"),
        ("a:\n\tb: 1\n", "f.yaml:2: not valid YAML: found a tab; indent with spaces"),
        (
            "name: a: b",
            "f.yaml:1: not valid YAML: a second `:` in this place; put the value in quotes, or check the indentation",
        ),
        ("name: a\n---\nname: b\n", "f.yaml:2: not valid YAML: found a second document (`---`); expected one"),
        (
            "x: 1\nname: @a",
            "f.yaml:2: not valid YAML: found character '@' that cannot start any token; put the value in quotes",
        ),
        ("a: &x [1]\nb: *x\n", "f.yaml:1: anchors (`&x`) are not supported; write the value out"),
        ("a: 1\nb: *x\n", "f.yaml:2: aliases (`*x`) are not supported; write the value out"),
        (
            "a: !!python/name:os.system\n",
            "f.yaml:1: tags (`!!python/name:os.system`) are not supported; write a plain value",
        ),
        ("a: !x {}\n", "f.yaml:1: tags (`!x`) are not supported; write a plain value"),
        ("a: " + "[" * 100, "f.yaml:1: nested more than 40 levels deep"),
        ("1.5: a", "f.yaml:1: keys must be text, found 1.5; put it in quotes"),
        (b"a: 1\nb: \x00\n", "f.yaml:2: expected text, found control character U+0000"),
        (b"a: 1\nb: \xff\xfe\n", "f.yaml:2: expected UTF-8 text, found byte 0xff"),
        (b"\x1f\x8b\x08\x00", "f.yaml:1: expected UTF-8 text, found byte 0x8b"),
        ('name: "\\ud800"', "f.yaml: name: expected text, found half a character (a lone surrogate)"),
        (
            "count: " + "9" * 5000,
            "f.yaml: not valid YAML: Exceeds the limit (4300 digits) for integer string conversion",
        ),
        ("a: " + "x" * MAX_BYTES, "f.yaml: larger than 1,048,576 bytes, so it is no file for opdcheck"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused(complaint, text, message):
    assert complaint(text) == message


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file$"):
        load(tmp_path / "nope.yaml", File)
    with pytest.raises(ConfigError, match=r"expected a YAML file, found a folder$"):
        load(tmp_path, File)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Path("a\0b"), File)


def test_an_error_found_later_points_at_its_key_or_flag(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("name: a\nlimit:\n  total: 1\n")
    found = load_located(path, File)
    error = found.error("limit.total", "too small", hint="Try 2.")
    assert (error.message, error.hint) == (f"{path}:3: limit.total: too small", "Try 2.")
    flagged = found.replace(found.value, {"limit": "--limit"})
    assert flagged.error("limit.total", "too small").message == "--limit: too small"
    assert flagged.error("name", "too short").message == f"{path}:1: name: too short"


@pytest.mark.parametrize(
    ("message", "pointed"),
    [
        ("limit.total: too small", "{path}:3: limit.total: too small"),
        ("limit: too small", "{path}:2: limit: too small"),
        ("limit.total[3].x: too small", "{path}:3: limit.total[3].x: too small"),
        ("budget: not ours", "budget: not ours"),
        ("limit.jsonl: a file", "limit.jsonl: a file"),
        ("/some/path: cannot be read", "/some/path: cannot be read"),
        ("f.yaml:3: limit: known already", "f.yaml:3: limit: known already"),
        ("limit is too small", "limit is too small"),
    ],
)
def test_errors_that_begin_with_a_key_are_pointed_at_it(tmp_path, message, pointed):
    path = tmp_path / "f.yaml"
    path.write_text("name: a\nlimit:\n  total: 1\n")
    found = load_located(path, File)
    with pytest.raises(ConfigError) as caught, found.pointing():
        raise ConfigError(message, hint="Try 2.")
    assert (caught.value.message, caught.value.hint) == (pointed.format(path=path), "Try 2.")


@pytest.mark.parametrize("key", ["a", "a.b", "a[0].b[1][2]", ""])
def test_key_notation_round_trips(key):
    assert show_key(as_key(key)) == key


def test_dump_is_stable_and_reads_back(tmp_path):
    value = File(name="2026-01-31", limit=Limit(total=1e-05, layers={"model.layers.0": 0.1 + 0.2}), pair=(1, "x: y"))
    text = dump(value, skip_defaults=True)
    assert text == snapshot("""\
name: '2026-01-31'
limit:
  total: 1.0e-05
  layers:
    model.layers.0: 0.30000000000000004
pair:
- 1
- 'x: y'
""")
    path = tmp_path / "f.yaml"
    path.write_text(text)
    assert load(path, File) == value
    assert "day: null" in dump(value)


# What YAML itself cannot hold: control characters and lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"], exclude_characters="\ufeff\ufffe\uffff"))


@settings(deadline=None, max_examples=100)
@given(
    name=texts,
    total=st.floats(min_value=0, allow_infinity=False),
    layers=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
@example(name="yes", total=5e-324, layers={"1": 1e22, "<<": -0.0, "~": 1e16})
def test_what_dump_writes_load_reads(tmp_path_factory, name, total, layers):
    path = tmp_path_factory.mktemp("dump") / "f.yaml"
    value = File(name=name, limits=[Limit(total=total, layers=layers)])
    path.write_text(dump(value), encoding="utf-8")
    assert load(path, File) == value


def test_dump_writes_infinities_and_nan(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(dump(Limit(total=math.inf, layers={"a": math.nan, "b": -math.inf})))
    found = load(path, Limit)
    assert found.total == math.inf
    assert math.isnan(found.layers["a"])
    assert found.layers["b"] == -math.inf


def load_or_complain(path: Path, content: bytes, model: type[BaseModel]) -> None:
    path.write_bytes(content)
    message = str(path)
    try:
        load(path, model)
    except ConfigError as error:
        message = error.message
    assert message.startswith(str(path))


@settings(deadline=None, max_examples=150)
@given(
    content=st.binary(max_size=200)
    | st.text(alphabet="ab:- \n\t[]{}&*!|>'\"#%@`,?<0123.eE+~\\x", max_size=80).map(str.encode)
)
@example(content=b"? [a]\n: b")
@example(content=b"? {a: 1}\n: b")
@example(content=b"<<: {name: a}\n")
@example(content=b"%YAML 1.1\n---\nname: 1:30\n")
@example(content=b"%YAML 9.9\n---\nname: x\n")
@example(content=b"%TAG ! x\n---\nname: x\n")
@example(content=b"1: a\n'1': b\n")
@example(content=b"name: 0b12\ncount: 0o9\n")
@example(content=b"name: 1e999999\n")
@example(content=b"? \n")
def test_any_bytes_give_a_model_or_a_config_error(tmp_path_factory, content):
    load_or_complain(tmp_path_factory.mktemp("fuzz") / "f.yaml", content, File)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.floats()
    | st.sampled_from(["a", "fp8", "FP8", "~x", ".", "/"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", min_size=1), inner, max_size=3),
    max_leaves=5,
)
sections = ["student", "teacher", "rollout", "workload", "budget", "decision"]
inside = ["path", "engine", "quantization", "scheme", "sampling", "prompts", "alpha", "model", "config_groups", "noise"]
candidates = st.dictionaries(
    st.sampled_from(sections), plain | st.dictionaries(st.sampled_from(inside), plain, max_size=4), max_size=6
)


@settings(deadline=None, max_examples=150)
@given(data=candidates)
def test_any_structure_gives_a_candidate_or_a_config_error(tmp_path_factory, data):
    from io import BytesIO

    from ruamel.yaml import YAML

    stream = BytesIO()
    YAML().dump(data, stream)
    load_or_complain(tmp_path_factory.mktemp("fuzz") / "f.yaml", stream.getvalue(), Candidate)


def test_import_is_light():
    code = (
        "import sys, opdcheck.config, opdcheck.yamlfile; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="found a device or a pipe"):
        load(tmp_path / "pipe.yaml", File)
