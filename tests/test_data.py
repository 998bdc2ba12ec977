"""Prompts: files to left-padded arrays, in an order that can be taken up again."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_stub import make_tokenizer

from jppo.config import DataConfig
from jppo.data import (
    DataError,
    Pair,
    PromptData,
    read_pairs,
    read_rows,
)

PAD = 9


def lines(tmp_path, *rows, raw=False):
    path = tmp_path / "rows.jsonl"
    texts = rows if raw else map(json.dumps, rows)
    path.write_bytes(
        b"".join(t if isinstance(t, bytes) else f"{t}\n".encode() for t in texts)
    )
    return path


def prompt_data(rows, tokenizer=None, *, room=8, seed=0, **settings):
    return PromptData(
        rows,
        tokenizer or make_tokenizer(),
        DataConfig(**settings),
        pad_id=PAD,
        room=room,
        seed=seed,
    )


def numbered(n, **settings):
    return prompt_data(["red " * (1 + i % 3) for i in range(n)], **settings)


# Files


def test_rows_keep_every_column_and_skip_blank_lines(tmp_path):
    path = lines(
        tmp_path, '{"prompt": "a\u2028b", "n": 1}', "", '{"prompt": ""}', raw=True
    )
    assert read_rows(path, ["prompt"]) == [
        {"prompt": "a\u2028b", "n": 1},
        {"prompt": ""},
    ]


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = lines(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n', raw=True)
    assert read_rows(path, ["prompt"]) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "a"} x', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"3", "expected an object, got '3'"),
        (b'["prompt"]', "expected an object"),
        (
            b'{"text": "a", "id": 1}',
            r"'prompt' must be a string, got None.*'id', 'text'",
        ),
        (b'{"prompt": 7}', "column 'prompt' must be a string, got 7"),
        (b'{"prompt": null}', "column 'prompt' must be a string, got None"),
        (b'{"prompt": ["a"]}', "column 'prompt' must be a string"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, row, says):
    path = lines(tmp_path, '{"prompt": "a"}', "", row, raw=True)
    with pytest.raises(DataError, match=says) as caught:
        read_rows(path, ["prompt"])
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_file_without_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(tmp_path / "rows.jsonl", ["prompt"])
    with pytest.raises(DataError, match="neither Parquet files nor"):
        read_rows(tmp_path, ["prompt"])
    with pytest.raises(DataError, match="no rows"):
        read_rows(lines(tmp_path, "", raw=True), ["prompt"])


def test_pairs(tmp_path):
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    other = row | {"chosen": "d"}
    path = lines(tmp_path, row, other)
    assert read_pairs(path) == [Pair("p", "c", "r"), Pair("p", "d", "r")]
    with pytest.raises(DataError, match=":2: column 'rejected'"):
        read_pairs(lines(tmp_path, row, {"prompt": "p", "chosen": "c"}))


# Order


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_every_pass_holds_each_row_once(n, batch, shuffle, seed):
    """Cut into batches of any size, larger than the data too, the stream wraps."""
    data = numbered(n, shuffle=shuffle, seed=seed)
    stream, cursor = [], 0
    while cursor < 3 * n:
        stream += data.order(cursor, batch)
        cursor += batch
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert len(stream) == cursor


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 12))
def test_the_order_follows_from_the_cursor_alone(n, cursor, count):
    """A resumed run, a new object, sees the rows that the first would have seen."""
    whole = numbered(n).order(0, cursor + count)
    assert numbered(n).order(cursor, count) == whole[cursor:]


def test_passes_and_seeds_differ_in_order():
    data = numbered(50)
    first, second = data.order(0, 50), data.order(50, 50)
    assert first != second and first != list(range(50))
    assert numbered(50, seed=1).order(0, 50) != first
    assert numbered(50, shuffle=False).order(0, 60) == [*range(50), *range(10)]


# Arrays


def test_prompts_are_left_padded_to_the_longest():
    data = prompt_data(["red", "red green blue", "blue one"])
    batch = data.batch([2, 0])
    assert batch.tokens.tolist() == [[PAD, 5, 6], [PAD, PAD, 3]]
    assert batch.mask.tolist() == [[False, True, True], [False, False, True]]
    assert batch.weight.tolist() == [1, 1] and batch.row.tolist() == [0, 1]
    assert batch.tokens.dtype == batch.row.dtype == np.int32
    assert batch.weight.dtype == np.float32 and batch.mask.dtype == np.bool_


@pytest.mark.parametrize(("slots", "width"), [(0, 2), (2, 2), (5, 5), (20, 8)])
def test_the_width_is_the_setting_within_the_window(slots, width):
    """One width a run, whatever is in the batch: one compiled program."""
    data = prompt_data(["red", "red red"], max_prompt_tokens=slots)
    assert data.width == width
    assert data.batch([0]).tokens.shape == (1, width)


def test_one_pass_in_order_ends_with_weight_0_rows():
    data = prompt_data(["red", "green", "blue", "one two", "three"])
    parts = list(data.batches(2))
    assert [indices for indices, _ in parts] == [[0, 1], [2, 3], [4]]
    assert [p.weight.tolist() for _, p in parts] == [[1, 1], [1, 1], [1, 0]]
    last = parts[-1][1]
    assert last.tokens.shape == (2, 2) and not last.mask[1].any()
    assert last.tokens[1].tolist() == [PAD, PAD] and last.mask[0].tolist() == [
        False,
        True,
    ]
    assert [len(p.row) for _, p in parts] == [2, 2, 2]
    (indices, one), *rest = data.batches(8)
    assert not rest and indices == [0, 1, 2, 3, 4]
    assert one.weight.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_columns_travel_with_their_rows():
    rows = [
        {"prompt": "red", "answer": 3, "id": "x"},
        {"prompt": "green", "answer": None},
        {"prompt": "blue"},
    ]
    data = prompt_data(rows)
    assert data.texts([2, 0]) == ["blue", "red"]
    assert data.columns([2, 0]) == {"answer": [None, 3], "id": [None, "x"]}
    assert data.columns([2]) == {"answer": [None], "id": [None]}
    assert data.names == ["answer", "id"]
    assert prompt_data([{"q": "red", "prompt": 1}], column="q").columns([0]) == {
        "prompt": [1]
    }


def test_a_dropped_row_takes_its_columns_with_it():
    rows = [{"prompt": "red " * n, "n": n} for n in (5, 1, 9, 2)]
    data = prompt_data(rows, max_prompt_tokens=3, overlong="drop")
    assert (len(data), data.dropped, data.width) == (2, 2, 3)
    assert data.columns([0, 1]) == {"n": [1, 2]}
    assert sorted(data.order(0, 2)) == [0, 1]


# Errors


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "list of prompts is empty"),
        ((), "list of prompts is empty"),
        ("red green", "must be a list of strings, got 'red green'"),
        (["red", ""], "prompt 1 is empty"),
        (["red", "  \n "], "prompt 1 is empty"),
        (["red", {"prompt": None}], "prompt 1: column 'prompt' must be .* got None"),
        (["red", {"prompt": 3}], "prompt 1: .* got 3"),
        ([{"text": "red"}], "prompt 0: column 'prompt' must be a string"),
        (["red", "red " * 9], "prompt 1 has 9 tokens, the limit is 8"),
    ],
)
def test_bad_prompts_are_named(rows, says):
    with pytest.raises(DataError, match=says) as caught:
        prompt_data(rows)
    assert "\n" not in str(caught.value)


def test_overlong_prompts():
    rows = ["red " * n for n in (1, 4, 3)]
    with pytest.raises(
        DataError, match="prompt 1 has 4 tokens, the limit is 3"
    ) as caught:
        prompt_data(rows, max_prompt_tokens=3)
    assert "data.max_prompt_tokens" in str(caught.value)
    assert prompt_data(rows, max_prompt_tokens=4).dropped == 0
    with pytest.raises(DataError, match="all 3 prompts are longer than 2 tokens"):
        prompt_data(["red " * 3] * 3, max_prompt_tokens=2, overlong="drop")


def test_a_window_without_room_names_the_setting():
    with pytest.raises(DataError, match="sampling.max_new_tokens leaves no room"):
        prompt_data(["red"], room=0)
    assert prompt_data(["red"], room=1).width == 1


# Chats

CHAT = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def chatty(**kwargs):
    tokenizer = make_tokenizer(**kwargs)
    tokenizer.chat_template = CHAT
    return tokenizer


def user(text):
    return [{"role": "user", "content": text}]


def test_prompts_of_messages_end_where_the_assistant_begins():
    rows = [{"prompt": user("red"), "answer": 1}, {"prompt": "blue"}]
    data = prompt_data(rows, chatty())
    assert data.texts([0, 1]) == ["<s> user red </s> <s> assistant ", "blue"]
    assert data.prompts([1, 0]) == ["blue", user("red")]  # as they were given
    assert data.columns([0]) == {"answer": [1]}
    assert data.batch([0]).tokens.tolist() == [[1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize(
    "rows", [[user("red")], [{"prompt": user("red")}], [{"messages": user("red")}]]
)
def test_a_chat_may_come_bare_or_in_either_column(rows):
    data = prompt_data(rows, chatty())
    assert data.prompts([0]) == [user("red")] and data.names == []


def test_a_prompt_has_one_bos_whoever_writes_it():
    data = prompt_data(["<s> red", "green blue"], make_tokenizer(add_bos=True))
    assert data.batch([0, 1]).tokens.tolist() == [[PAD, 1, 3], [1, 4, 5]]
    chat = prompt_data([user("red")], chatty(add_bos=True))
    assert chat.ids == [[1, 2, 3, 0, 1, 2]]


def test_a_chat_that_cannot_be_written_names_its_row(tmp_path):
    path = lines(tmp_path, {"prompt": "red"}, {"prompt": user("red")})
    with pytest.raises(DataError, match=r"rows.jsonl:2: the tokenizer has no chat t"):
        prompt_data(read_rows(path))
    with pytest.raises(DataError, match="prompt 1: the last message is the assistant"):
        said = [*user("red"), {"role": "assistant", "content": "blue"}]
        prompt_data([user("red"), said], chatty())


# Pairs


def test_pairs_of_chats_need_a_tokenizer(tmp_path):
    says = [{"role": "assistant", "content": text} for text in ("one", "two")]
    row = {"prompt": user("red"), "chosen": says[:1], "rejected": says[1:]}
    path = lines(tmp_path, row | {"margin": 2}, {"chosen": "one", "rejected": "two"})
    chat, text = read_pairs(path, chatty())
    prompt = "<s> user red </s> <s> assistant "
    assert chat == Pair(prompt, "one </s>", "two </s>", 2.0)
    assert text == Pair("", "one", "two", 0.0)
    with pytest.raises(DataError, match="rows.jsonl:1: .* give a tokenizer"):
        read_pairs(path)
