"""Rows to token ids with marks, and preferences of every form."""

import pytest
from test_chat import ONCE, TEMPLATE, TWICE, chat, chatty
from tokenizer_stub import make_tokenizer

from jppo.examples import Pair, encode_example, encode_pair, render_pair
from jppo.models.tokenizer import set_eos_token_ids
from jppo.readers import DataError

# Ids: </s> 0, <s> 1, <unk> 2, red 3, green 4, blue 5, one 6, two 7
RED = chat("user red", "assistant one", "user blue", "assistant two")


def marked(example):
    assert len(example.ids) == len(example.trained)
    return [i if on else -i for i, on in zip(example.ids, example.trained, strict=True)]


# Examples: untrained ids are negative


@pytest.mark.parametrize(
    ("row", "plain", "with_bos"),
    [
        ({"text": "red one"}, [3, 6, 0], [-1, 3, 6, 0]),
        ({"prompt": "red", "completion": "one"}, [-3, 6, 0], [-1, -3, 6, 0]),
        ({"prompt": "", "completion": "one"}, [6, 0], [-1, 6, 0]),
        ({"prompt": "<s> red", "completion": "one"}, [-1, -3, 6, 0], [-1, -3, 6, 0]),
        ({"prompt": "red", "completion": "one </s>"}, [-3, 6, 0], [-1, -3, 6, 0]),
    ],
)
def test_texts_end_with_eos_and_begin_with_one_bos(row, plain, with_bos):
    assert marked(encode_example(make_tokenizer(), row)) == plain
    assert marked(encode_example(make_tokenizer(add_bos=True), row)) == with_bos


def test_a_chat_is_trained_on_every_turn_of_the_assistant():
    ids = encode_example(chatty(), {"messages": RED}).ids
    # <user> red </s> <assistant> one </s> <user> blue </s> <assistant> two </s>
    assert ids == [2, 3, 0, 2, 6, 0, 2, 5, 0, 2, 7, 0]
    on = encode_example(chatty(), {"messages": RED}).trained
    assert [i for i, mark in enumerate(on) if mark] == [4, 5, 10, 11]
    last = encode_example(chatty(), {"prompt": RED[:3], "completion": RED[3:]})
    assert last.ids == ids and sum(last.trained) == 2 and all(last.trained[10:])


def test_a_bos_of_the_template_is_the_only_one():
    for template in (f"<s> {TEMPLATE}", TEMPLATE):
        tokenizer = chatty(template, add_bos=True)
        example = encode_example(tokenizer, {"messages": RED[:2]})
        assert example.ids == [1, 2, 3, 0, 2, 6, 0]
        assert example.trained == [False] * 5 + [True] * 2


def test_a_tokenizer_that_ends_texts_itself_does_not_end_the_prompt():
    from tokenizers import processors

    tokenizer = make_tokenizer(add_bos=True)
    words = tokenizer.backend_tokenizer
    kept = words.post_processor
    ends = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 0)]
    )
    try:
        words.post_processor = ends
        row = {"prompt": "red", "completion": "one"}
        assert encode_example(tokenizer, row).ids == [1, 3, 6, 0]
    finally:
        words.post_processor = kept


def test_any_eos_of_the_model_ends_a_text():
    tokenizer = make_tokenizer()
    set_eos_token_ids(tokenizer, [7])
    assert encode_example(tokenizer, {"text": "red two"}).ids == [3, 7]
    assert encode_example(tokenizer, {"text": "red"}).ids == [3, 0]


@pytest.mark.parametrize("row", [{"text": ""}, {"prompt": "red", "completion": " "}])
def test_nothing_to_learn_is_an_error(row):
    with pytest.raises(DataError, match="^f:3: the completion is empty"):
        encode_example(make_tokenizer(), row, "f:3")


# Preferences


CHOSEN, REJECTED = chat("assistant one"), chat("assistant two")
FORMS = [
    {"prompt": RED[:1], "chosen": CHOSEN, "rejected": REJECTED},
    {"prompt": RED[:1], "chosen": "one", "rejected": "two"},
    {"chosen": RED[:1] + CHOSEN, "rejected": RED[:1] + REJECTED},
    {"prompt": None, "chosen": RED[:1] + CHOSEN, "rejected": RED[:1] + REJECTED},
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_of_a_pair_of_chats(row):
    """Completions end where a policy's would: at EOS, not at the line after it."""
    prompt = "<user> red </s>\n<assistant> "
    assert render_pair(chatty(), row) == Pair(prompt, "one </s>", "two </s>")
    pair = encode_pair(chatty(), row | {"margin": 0.5})
    assert marked(pair.chosen) == [-2, -3, 0, -2, 6, 0]
    assert marked(pair.rejected) == [-2, -3, 0, -2, 7, 0]
    assert pair.margin == 0.5


def test_pairs_of_texts():
    row = {"prompt": "red", "chosen": "one", "rejected": "two", "margin": 1}
    assert render_pair(None, row) == Pair("red", "one", "two", 1.0)
    assert render_pair(None, {"chosen": "one", "rejected": "two", "margin": None}) == (
        Pair("", "one", "two", 0.0)
    )
    pair = encode_pair(make_tokenizer(), row)
    assert marked(pair.chosen) == [-3, 6, 0] and marked(pair.rejected) == [-3, 7, 0]


def test_an_implicit_prompt_leaves_something_to_answer_it():
    """One chat is the beginning of the other, or both are the same."""
    row = {"chosen": ONCE, "rejected": TWICE}
    pair = render_pair(chatty(), row)
    assert pair.prompt == "<user> a </s>\n<assistant> " and pair.chosen == "b </s>"
    assert pair.rejected.startswith("b </s>\n<user> c")
    same = render_pair(chatty(), {"chosen": ONCE, "rejected": ONCE})
    assert same.chosen == same.rejected == "b </s>"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": "one"}, "column 'rejected' must be .* got None"),
        ({"chosen": CHOSEN, "rejected": "two"}, "share no message"),
        ({"chosen": RED[2:], "rejected": TWICE}, "share no message .* column 'prompt'"),
        ({"chosen": ONCE, "rejected": []}, "list of messages is empty"),
        ({"prompt": "a", "chosen": ONCE, "rejected": ONCE}, "'chosen' holds messages"),
        (FORMS[0] | {"rejected": RED[2:3]}, "rejected: .* must be the assistant's"),
        (FORMS[0] | {"margin": "1"}, "'margin' must be a number, got '1'"),
        (FORMS[0] | {"margin": True}, "'margin' must be a number, got True"),
        (FORMS[0] | {"margin": float("nan")}, "'margin' must be finite, got nan"),
    ],
)
def test_pairs_that_fit_no_form(row, says):
    with pytest.raises(DataError, match=says) as caught:
        render_pair(chatty(), row, "pairs.jsonl:7")
    assert str(caught.value).startswith("pairs.jsonl:7: ")
    assert "\n" not in str(caught.value)
