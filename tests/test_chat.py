"""Chats to text by the tokenizer's own template, and back to marks on its parts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_stub import make_tokenizer

from jppo.chat import render_example, render_prompt, render_turns
from jppo.readers import DataError

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('no critics\nhere') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def chatty(template=TEMPLATE, **kwargs):
    tokenizer = make_tokenizer(**kwargs)
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns):
    """("user red", …) as messages."""
    names = ("role", "content")
    return [dict(zip(names, turn.split(" ", 1), strict=True)) for turn in turns]


def fails(says, fn, *args):
    with pytest.raises(DataError, match=says) as caught:
        fn(*args, "rows.jsonl:7")
    assert str(caught.value).startswith("rows.jsonl:7: ")
    assert "\n" not in str(caught.value)


# Prompts


def test_a_text_stays_as_it_is():
    assert render_prompt(make_tokenizer(), " red\n") == " red\n"


def test_a_chat_ends_with_the_opening_of_the_reply():
    tokenizer = chatty()
    one = render_prompt(tokenizer, chat("user red"))
    assert one == "<user> red </s>\n<assistant> "
    more = render_prompt(tokenizer, chat("system s", "user a", "assistant b", "user c"))
    assert more.startswith("<system> s </s>\n<user> a </s>\n<assistant> b </s>\n")
    assert more.endswith("<user> c </s>\n<assistant> ")


def test_prompts_that_cannot_be_written():
    tokenizer = chatty()
    fails("no chat template", render_prompt, make_tokenizer(), chat("user red"))
    fails(
        "the chat template failed: no critics here",
        render_prompt,
        tokenizer,
        chat("critic red"),
    )
    broken = chatty("{% for %}")
    fails("the chat template failed", render_prompt, broken, chat("user red"))
    for messages, says in (
        ([], "list of messages is empty"),
        (["red"], "expected a list of messages, got"),
        ({"role": ["user"], "content": ["red"]}, "expected a list of messages"),
        ([{"content": "red"}], "message 0 needs a role"),
        ([{"role": 3, "content": "red"}], "message 0 needs a role"),
        ([*chat("user red"), {"role": "tool"}], "message 1 needs content"),
        (chat("user a", "assistant b"), "the last message is the assistant's"),
    ):
        fails(says, render_prompt, tokenizer, messages)


# Turns


def test_turns_are_what_the_template_adds():
    turns = render_turns(
        chatty(), chat("user a", "assistant b", "user c", "assistant d")
    )
    assert turns == [
        ("<user> a </s>\n<assistant> ", False),
        ("b </s>\n", True),
        ("<user> c </s>\n<assistant> ", False),
        ("d </s>\n", True),
    ]


TURNS = st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=6)
WORDS = st.sampled_from(["red", "green\nblue", "  ", "<assistant>", "é"])


@settings(max_examples=50, deadline=None)
@given(TURNS, st.data())
def test_joined_turns_are_the_whole_chat(roles, data):
    roles = ["system", "user", *roles, "assistant"]
    messages = [{"role": role, "content": data.draw(WORDS)} for role in roles]
    tokenizer = chatty()
    turns = render_turns(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(text for text, _ in turns) == whole
    said = [f"{m['content']} </s>\n" for m in messages if m["role"] == "assistant"]
    assert [text for text, own in turns if own] == said


def test_turns_that_cannot_be_told_apart():
    tokenizer = chatty()
    fails(
        "role 'user', it must be the assistant's",
        render_turns,
        tokenizer,
        chat("user a"),
    )
    fails(
        "first message is the assistant", render_turns, tokenizer, chat("assistant a")
    )
    forgetful = chatty("{{ messages[-1].content }}")
    fails(
        "message 1 the chat template writes",
        render_turns,
        forgetful,
        chat("user a", "assistant b"),
    )


# Rows


LAST = ("<user> a </s>\n<assistant> ", "b </s>\n")
ONCE = chat("user a", "assistant b")
TWICE = [*ONCE, *chat("user c", "assistant d")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "red ", "completion": "blue"}, ("red ", "blue")),
        ({"prompt": "", "completion": "blue", "id": 3}, ("", "blue")),
        ({"text": "red blue"}, ("", "red blue")),
        ({"prompt": ONCE[:1], "completion": ONCE[1:]}, LAST),
        ({"prompt": ONCE[:1], "completion": "b"}, LAST),
        ({"messages": ONCE}, LAST),
        ({"messages": ONCE, "prompt": None, "text": None}, LAST),
        (
            {"messages": TWICE},
            (f"{LAST[0]}{LAST[1]}<user> c </s>\n<assistant> ", "d </s>\n"),
        ),
        (
            {"prompt": ONCE[:1], "completion": TWICE[1:]},
            (LAST[0], f"{LAST[1]}<user> c </s>\n<assistant> d </s>\n"),
        ),
    ],
)
def test_every_form_of_a_row(row, expected):
    assert render_example(chatty(), row) == expected


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "red"}, "column 'completion' must be .* got None; the row has"),
        ({"id": 1}, r"column 'prompt' must be .* the row has \['id'\]"),
        ({"text": 3}, "column 'text' must be a string"),
        ({"text": ONCE}, "column 'text' must be a string"),
        ({"prompt": "red", "completion": ONCE}, "'completion' holds messages, but"),
        ({"prompt": ONCE, "completion": ONCE[1:]}, "the prompt ends with role 'assis"),
        ({"prompt": ONCE[:1], "completion": ONCE}, "the completion begins with 'user'"),
        ({"prompt": ONCE[:1], "completion": []}, "list of messages is empty"),
        ({"messages": ONCE[:1]}, "list of messages is empty"),
        ({"messages": "red"}, "expected a list of messages"),
        ({"messages": TWICE[:3]}, "the completion begins with 'user'"),
    ],
)
def test_rows_that_fit_no_form(row, says):
    fails(says, render_example, chatty(), row)


def test_a_template_that_rewrites_a_long_prompt_can_still_complete_it():
    """Only the boundary before the completion must be stable, not those inside."""
    strips = chatty(
        "{% for m in messages %}<{{ m.role }}> {% if loop.last or m.role == 'user' %}"
        "{{ m.content }}{% endif %} </s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    prompt, completion = render_example(strips, {"messages": TWICE})
    assert completion == "d </s>\n" and "<assistant>  </s>" in prompt
    fails("message 3 the chat template writes", render_turns, strips, TWICE)
