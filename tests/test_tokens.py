"""Texts to arrays, and where a response ends."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_stub import make_tokenizer

from jppo.config import ConfigError
from jppo.models.tokenizer import set_eos_token_ids
from jppo.tokens import (
    encode,
    pad,
    pad_token_id,
    stop_strings,
    stop_token_ids,
    trim_at_stop_strings,
    trim_rollout,
)
from jppo.types import Rollout

PAD = 9


# Arrays


def test_pad_on_either_side():
    tokens, mask = pad([[1, 2], [], [3, 4, 5]], 3, PAD, left=True)
    assert tokens.tolist() == [[PAD, 1, 2], [PAD] * 3, [3, 4, 5]]
    assert mask.tolist() == [[False, True, True], [False] * 3, [True] * 3]
    tokens, mask = pad([[1, 2], []], 3, PAD, left=False)
    assert tokens.tolist() == [[1, 2, PAD], [PAD] * 3]
    assert mask.tolist() == [[True, True, False], [False] * 3]
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


# Tokens


def test_exactly_one_bos():
    """Where the tokenizer adds one, and where the text brings its own."""
    adds, plain = make_tokenizer(add_bos=True), make_tokenizer()
    assert encode(plain, ["red", "green"]) == [[3], [4]]
    assert encode(adds, ["red", "<s> red", ""]) == [[1, 3], [1, 3], [1]]
    assert encode(adds, ["red <s> <s>"]) == [[1, 3, 1, 1]]


def test_stop_tokens():
    tok = make_tokenizer()
    assert stop_token_ids(tok, ()) == (0,)
    assert stop_token_ids(tok, ("blue", "</s>", "red", "blue")) == (0, 5, 3)
    assert stop_token_ids(make_tokenizer(add_bos=True), ("blue",)) == (0, 5)
    assert stop_token_ids(tok, ("blue", "red blue")) == (0, 5)
    with pytest.raises(ConfigError, match="'' is 0 tokens"):
        stop_token_ids(tok, ("",))


def test_a_stop_text_outside_the_vocabulary_is_an_error():
    """It would stop at every unknown token."""
    with pytest.raises(ConfigError, match="'purple'"):
        stop_token_ids(make_tokenizer(), ("purple",))


def test_a_tokenizer_without_eos_needs_a_stop_text():
    bare = make_tokenizer(eos=None)
    with pytest.raises(ConfigError, match="no EOS token: give sampling.stop"):
        stop_token_ids(bare, ())
    assert stop_token_ids(bare, ("blue",)) == (5,)


def test_padding_without_a_pad_token_is_a_stop_token():
    assert pad_token_id(make_tokenizer(), (0, 5)) == 0
    assert pad_token_id(make_tokenizer(eos=None), (5,)) == 5
    assert pad_token_id(make_tokenizer(pad="green"), (0,)) == 4
    assert pad_token_id(make_tokenizer(pad="</s>"), (5,)) == 0


def test_every_eos_of_the_model_stops():
    tok = make_tokenizer()
    set_eos_token_ids(tok, [4, 0])
    assert stop_token_ids(tok, ("blue", "green")) == (0, 4, 5)
    bare = make_tokenizer(eos=None)
    set_eos_token_ids(bare, [4])
    assert stop_token_ids(bare, ()) == (4,)


def test_stop_texts_of_several_tokens_are_strings():
    tok = make_tokenizer()
    stops = ("blue", "red blue", "one two", "red blue")
    assert stop_strings(tok, stops) == ("red blue", "one two")
    with pytest.raises(ConfigError, match="'red purple' is not in the vocabulary"):
        stop_strings(tok, ("red purple",))
    with pytest.raises(ConfigError, match="text of one token"):
        stop_token_ids(make_tokenizer(eos=None), ("red blue",))


# Stop strings


def responses(*texts, width=6):
    tok = make_tokenizer()
    return tok, *pad(encode(tok, texts), width, PAD, left=False)


def test_a_response_is_cut_after_its_first_stop_string():
    tok, tokens, mask = responses(
        "one red blue two", "red green", "", "red blue red blue", "one red blue"
    )
    before = mask.copy()
    cut, which = trim_at_stop_strings(tok, tokens, mask, ["two one", "red blue"])
    assert cut.sum(-1).tolist() == [3, 2, 0, 2, 3]
    assert which.tolist() == [1, -1, -1, 1, 1]
    np.testing.assert_array_equal(mask, before)  # the input is left as it was


def test_the_first_string_in_the_text_counts():
    tok, tokens, mask = responses("one two red blue")
    stops = ["red blue", "one two", "two red"]
    cut, which = trim_at_stop_strings(tok, tokens, mask, stops)
    assert (cut.sum(), which.tolist()) == (2, [1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(3, 6), max_size=8), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(3, 6), min_size=2, max_size=3), max_size=3),
)
def test_a_cut_row_ends_with_the_token_that_completes_a_string(rows, stops):
    tok = make_tokenizer()
    texts = [tok.decode(ids) for ids in stops]
    tokens, mask = pad(rows, 8, PAD, left=False)
    cut, which = trim_at_stop_strings(tok, tokens, mask, texts)
    for ids, keep, found in zip(rows, cut, which, strict=True):
        kept = ids[: keep.sum()]
        ends = [
            i + len(stop)
            for stop in stops
            for i in range(len(ids))
            if ids[i : i + len(stop)] == stop
        ]
        assert len(kept) == min(ends, default=len(ids))
        assert (found >= 0) == bool(ends)
        if ends:
            assert kept[-len(stops[found]) :] == stops[found]


def rollout(tok, tokens, mask, stopped, stop_index):
    b = len(mask)
    prompt = np.full((b, 2), 3, np.int32)
    return Rollout(
        tokens=np.concatenate([prompt, tokens], -1),
        valid=np.concatenate([np.ones((b, 2), bool), mask], -1),
        mask=mask,
        logp=np.where(mask, np.float32(-1), np.float32(0)),
        stopped=np.array(stopped),
        stop_index=np.array(stop_index, np.int32),
        lengths=mask.sum(-1, dtype=np.int32),
    )


def test_a_trimmed_rollout_is_as_if_sampling_had_ended_there():
    tok, tokens, mask = responses(
        "one red blue two </s>", "one red blue", "one </s>", "red blue </s>", "one two"
    )
    stopped, index = [True, False, True, True, False], [0, -1, 0, 0, -1]
    given = jax.device_put(rollout(tok, tokens, mask, stopped, index))
    cut = trim_rollout(tok, given, ["red blue"], stop_ids=(0, 5), pad_id=PAD)
    assert cut.lengths.tolist() == [3, 3, 2, 2, 2]
    assert cut.stopped.tolist() == [True, True, True, True, False]
    assert cut.stop_index.tolist() == [2, 2, 0, 2, -1]
    assert cut.tokens[0].tolist() == [3, 3, 6, 3, 5, PAD, PAD, PAD]
    np.testing.assert_array_equal(cut.valid[:, 2:], cut.mask)
    np.testing.assert_array_equal(cut.mask.sum(-1), cut.lengths)
    assert (cut.logp[~cut.mask] == 0).all() and (cut.logp[cut.mask] == -1).all()
    for field in dataclasses.fields(Rollout):
        was, now = getattr(given, field.name), getattr(cut, field.name)
        assert (was.shape, was.dtype) == (now.shape, now.dtype), field.name


def test_a_stop_token_that_completes_the_string_stays_the_reason():
    tok, tokens, mask = responses("red </s>")
    cut = trim_rollout(
        tok,
        rollout(tok, tokens, mask, [True], [0]),
        ["red </s>"],
        stop_ids=(0,),
        pad_id=PAD,
    )
    assert (cut.stop_index.tolist(), cut.lengths.tolist()) == ([0], [2])
