"""Prompts: rows to token ids, and every wrong row told by file and line."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from opdcheck.config import ModelRef, Workload
from opdcheck.errors import ConfigError
from opdcheck.workload import MAX_ROW_BYTES, load_prompts, load_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples" / "smollm2"


@pytest.fixture(scope="session")
def tokenizer(tiny_student):
    return load_tokenizer(ModelRef(path=str(tiny_student)), Path())


@pytest.fixture
def prompts(tmp_path, monkeypatch, tokenizer):
    """Loads prompts from JSON Lines given as text, bytes or rows."""
    monkeypatch.chdir(tmp_path)

    def load(content, *, context=512, name="p.jsonl", tokenizer=tokenizer, **workload):
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        if content is not None:
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        chosen = Workload(**{"prompts": name, "max_completion_length": 16, **workload})
        return load_prompts(chosen, tmp_path, tokenizer, context)

    return load


@pytest.fixture
def complaint(prompts):
    def message(content, **options):
        with pytest.raises(ConfigError) as caught:
            prompts(content, **options)
        assert caught.value.exit_code == 2
        return caught.value.message

    return message


def test_text_is_tokenized_as_it_is(prompts, tokenizer):
    (found,) = prompts([{"prompt": "ab <|end|>", "id": 7, "other": None}])
    assert found.index == 0
    # One token per byte, the space among them, and the special token as one.
    assert tokenizer.convert_ids_to_tokens(found.token_ids) == ["a", "b", "Ġ", "<|end|>"]


def test_chat_ends_where_the_assistant_begins(prompts, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    (found,) = prompts([{"messages": messages}])
    tokens = ["<|system|>", "s", "<|end|>", "<|user|>", "h", "i", "<|end|>", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens(found.token_ids) == tokens


def test_chat_template_kwargs_reach_the_template(prompts, tiny_student):
    own = load_tokenizer(ModelRef(path=str(tiny_student)), Path())
    own.chat_template = "{% if enable_thinking %}yes{% else %}no{% endif %}"
    rows = [{"messages": [{"role": "user", "content": "x"}]}]
    assert len(prompts(rows, tokenizer=own, chat_template_kwargs={"enable_thinking": True})[0].token_ids) == 3
    assert len(prompts(rows, tokenizer=own)[0].token_ids) == 2


def test_only_the_rows_asked_for_are_read(prompts):
    content = '{"prompt": "a"}\n\n  \r\n{"prompt": "bc"}\nthis is no JSON\n'
    assert [len(found.token_ids) for found in prompts(content, num_prompts=2)] == [1, 2]
    assert [found.index for found in prompts(content, num_prompts=2)] == [0, 1]


def test_byte_order_mark_is_no_error(prompts):
    assert len(prompts(b'\xef\xbb\xbf{"prompt": "a"}')) == 1


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "p.jsonl: no prompts in this file"),
        ("\n\n", "p.jsonl: no prompts in this file"),
        ('{"prompt": "a"}\n{"prompt": ', "p.jsonl:2: expected one JSON object per line: Expecting value at column 12"),
        ('{"prompt": "a"}\n\n[1]', "p.jsonl:3: expected an object with `prompt` or `messages`, found a list of 1"),
        ('"a"', "p.jsonl:1: expected an object with `prompt` or `messages`, found the text 'a'"),
        ("{}", "p.jsonl:1: expected either `prompt` (text) or `messages` (chat), found neither"),
        ('{"text": "a"}', "p.jsonl:1: expected either `prompt` (text) or `messages` (chat), found neither"),
        (
            [{"prompt": "a", "messages": [USER]}],
            "p.jsonl:1: expected either `prompt` (text) or `messages` (chat), found both",
        ),
        ([{"prompt": 5}], "p.jsonl:1: prompt: expected text, found 5"),
        ([{"prompt": [USER]}], "p.jsonl:1: expected text in `prompt`; a list of chat messages belongs in `messages`"),
        ([{"prompt": ""}], "p.jsonl:1: the prompt has no tokens; expected at least one"),
        ('{"prompt": "\\ud800"}', "p.jsonl:1: prompt: expected text, found half a character (a lone surrogate)"),
        ([{"messages": []}], "p.jsonl:1: messages: expected a list of chat messages, found an empty list"),
        ([{"messages": "hi"}], "p.jsonl:1: messages: expected a list of chat messages, found the text 'hi'"),
        ([{"messages": ["hi"]}], "p.jsonl:1: messages[0]: expected `role` and `content`, found the text 'hi'"),
        ([{"messages": [{"role": "user"}]}], "p.jsonl:1: messages[0].content: expected text, found nothing (null)"),
        (
            [{"messages": [USER, {"role": 1, "content": "x"}]}],
            "p.jsonl:1: messages[1].role: expected text, found 1",
        ),
        (
            [{"messages": [USER, {"role": "assistant", "content": "y"}]}],
            "p.jsonl:1: messages[1]: expected a prompt, found the assistant's answer at its end",
        ),
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}', "p.jsonl:2: expected UTF-8 text, found byte 0xe9"),
        (b"x" * (MAX_ROW_BYTES + 1), "p.jsonl:1: the line is longer than 16,777,216 bytes"),
    ],
)
def test_a_wrong_row_is_told_by_line(complaint, content, message):
    assert complaint(content) == message


def test_fewer_rows_than_asked_for(complaint):
    found = complaint([{"prompt": "a"}] * 3, num_prompts=4)
    assert found == "p.jsonl: expected at least workload.num_prompts (4) rows, found 3"


def test_prompt_and_completion_must_fit_the_context(prompts, complaint):
    rows = [{"prompt": "a"}, {"prompt": "a" * 497}]
    assert complaint(rows) == (
        "p.jsonl:2: 497 prompt tokens and max_completion_length 16 make 513, more than the model's context of 512"
    )
    assert len(prompts(rows, context=513)) == 2
    assert len(prompts(rows, context=None)) == 2


def test_messages_without_a_chat_template(complaint, tiny_student, tmp_path):
    shutil.copytree(tiny_student, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    bare = load_tokenizer(ModelRef(path="bare"), tmp_path)
    message = complaint([{"messages": [USER]}], tokenizer=bare)
    assert message == "p.jsonl:1: `messages` needs a chat template, and the student's tokenizer has none"


def test_a_template_may_refuse(complaint, tiny_student):
    own = load_tokenizer(ModelRef(path=str(tiny_student)), Path())
    own.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = complaint([{"messages": [USER]}], tokenizer=own)
    assert message == "p.jsonl:1: the chat template does not take these messages: roles must alternate"
    own.chat_template = "{% for %}"
    assert complaint([{"messages": [USER]}], tokenizer=own).startswith("p.jsonl:1: the chat template does not take")


def test_missing_file(complaint):
    assert complaint(None) == "p.jsonl: cannot be read: No such file or directory"
    assert complaint(None, name="p.parquet").startswith("p.parquet: cannot be read as Parquet: ")


def parquet(name, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), name)


def test_parquet_gives_what_json_lines_give(prompts):
    assistant = {"role": "assistant", "content": "y"}
    chats = [[USER], [USER, assistant, {"role": "user", "content": "z", "name": "Ann"}]]
    parquet("p.parquet", {"id": [1, 2], "messages": chats})
    from_parquet = prompts(None, name="p.parquet")
    assert from_parquet == prompts([{"messages": chat} for chat in chats])
    parquet("t.parquet", {"prompt": ["ab", "c"]})
    assert prompts(None, name="t.parquet") == prompts([{"prompt": "ab"}, {"prompt": "c"}])
    parquet("mixed.parquet", {"prompt": ["ab", None], "messages": [None, [USER]]})
    assert len(prompts(None, name="mixed.parquet")) == 2


def test_text_in_parquet_that_is_not_utf_8_is_told_by_its_row(complaint):
    latin = pyarrow.array([b"a", b"caf\xe9"]).view(pyarrow.string())
    parquet("p.parquet", {"prompt": latin})
    assert complaint(None, name="p.parquet") == "p.parquet: row 2: expected UTF-8 text, found byte 0xe9"
    chat = pyarrow.StructArray.from_arrays([pyarrow.array(["user", "user"]), latin], ["role", "content"])
    parquet("c.parquet", {"messages": pyarrow.ListArray.from_arrays([0, 1, 2], chat)})
    assert complaint(None, name="c.parquet") == "c.parquet: row 2: expected UTF-8 text, found byte 0xe9"


def test_a_wrong_row_of_parquet_is_told_by_its_number(complaint):
    parquet("p.parquet", {"prompt": ["a", None, "b"]})
    assert complaint(None, name="p.parquet") == (
        "p.parquet: row 2: expected either `prompt` (text) or `messages` (chat), found neither"
    )
    parquet("n.parquet", {"text": ["a"], "label": [1]})
    assert complaint(None, name="n.parquet") == (
        "n.parquet: expected a column `prompt` or `messages`, found: 'text', 'label'"
    )
    parquet("e.parquet", {"prompt": pyarrow.array([], pyarrow.string())})
    assert complaint(None, name="e.parquet") == "e.parquet: no prompts in this file"
    assert complaint("no parquet", name="x.parquet").startswith("x.parquet: cannot be read as Parquet: ")


def test_a_folder_without_tokenizer(tmp_path, tiny_student):
    shutil.copy(tiny_student / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="cannot load the tokenizer of") as caught:
        load_tokenizer(ModelRef(path="."), tmp_path)
    assert caught.value.hint == "Save the tokenizer beside the weights (tokenizer.json, tokenizer_config.json)."
    with pytest.raises(ConfigError):
        load_tokenizer(ModelRef(path="./nope"), tmp_path)
    shutil.copy(tiny_student / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer of"):
        load_tokenizer(ModelRef(path="."), tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "prompt", "messages", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
@example(line=b"[" * 100_000)
@example(line=b'{"prompt": ' + b"9" * 5000 + b"}")
@example(line=b'{"messages": [{"role": "user", "content": "x", "tool_calls": 3}]}')
def test_any_line_gives_prompts_or_a_config_error(prompts, line):
    message = "p.jsonl"
    try:
        assert all(found.token_ids for found in prompts(line))
    except ConfigError as error:
        message = error.message
    assert message.startswith("p.jsonl")


def test_example_prompts_are_128_different_single_turns():
    rows = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 128
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
    assert len({row["messages"][0]["content"] for row in rows}) == 128


@pytest.mark.smollm2
def test_example_prompts_fit_smollm2(smollm2):
    tokenizer = load_tokenizer(ModelRef(path=str(smollm2)), Path())
    found = load_prompts(Workload(prompts="prompts.jsonl"), EXAMPLES, tokenizer, 1024)
    assert len(found) == 128
    assert tokenizer.decode(found[0].token_ids).endswith("<|im_start|>assistant\n")
