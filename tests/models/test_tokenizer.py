"""Tokenizers: read as they are, against a byte-level BPE written out here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import CFG, edit_config, random_params

from jppo.chat import render_prompt
from jppo.examples import encode_example
from jppo.models.hf import save_hf
from jppo.models.tokenizer import (
    eos_token_ids,
    import_transformers,
    load_tokenizer,
)
from jppo.tokens import encode, stop_strings, stop_token_ids, trim_at_stop_strings

TEXTS = [
    "Hello world",
    "a  12   345 and 6",
    "  leading, trailing  ",
    "I've can't we'll THEY'RE",
    "tabs\tand\n\nlines \n 7\n",
    "naïve café — 日本語 🙂 ½ ٣",
    "x=3.14159;y[0]+=1e-5",
    "",
]


def tiny_tokenizer(**tokens: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {t: i for i, t in enumerate(["<eos>", "a", "1", "2", "12", "Ġ", "ĠĠ"])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("1", "2"), ("Ġ", "Ġ")]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    kind = import_transformers().PreTrainedTokenizerFast
    return kind(tokenizer_object=bpe, **tokens)


def test_saved_with_the_model(tmp_path):
    tokenizer = tiny_tokenizer(eos_token="<eos>")
    save_hf(tmp_path / "m", CFG, random_params(CFG), tokenizer)
    back = load_tokenizer(tmp_path / "m")
    assert back("a  12")["input_ids"] == [1, 6, 2, 3]
    config = json.loads((tmp_path / "m/config.json").read_text())
    generation = json.loads((tmp_path / "m/generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == 0
    assert config["bos_token_id"] is None and "bos_token_id" not in generation


def test_every_eos_of_the_model_is_kept(tmp_path):
    """The files beside the tokenizer, as `transformers` reads them; its own first."""
    folder = tmp_path / "m"
    save_hf(folder, CFG, random_params(CFG), tiny_tokenizer(eos_token="<eos>"))
    assert eos_token_ids(load_tokenizer(folder)) == (0,)
    edit_config(folder, eos_token_id=[3, 0, 2])
    assert eos_token_ids(load_tokenizer(folder)) == (0,)  # the other file has one
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(load_tokenizer(folder)) == (0, 3, 2)
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": null}')
    assert eos_token_ids(load_tokenizer(folder)) == (0, 3, 2)
    generation.write_text('{"eos_token_id": 5}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_id, eos_token_ids(tokenizer)) == (0, (0, 5))
    assert tokenizer.pad_token_id == 0
    save_hf(tmp_path / "again", CFG, random_params(CFG), tokenizer)
    assert eos_token_ids(load_tokenizer(tmp_path / "again")) == (0, 5)
    assert stop_token_ids(load_tokenizer(tmp_path / "again"), ["a"]) == (0, 5, 1)


@pytest.mark.parametrize("eos", ['"</s>"', "[2, true]", "[-1]", "{}"])
def test_an_eos_that_is_no_id_is_an_error(tmp_path, eos):
    tiny_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is"):
        load_tokenizer(tmp_path)


def test_missing_pad_is_eos(tmp_path):
    tiny_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 0
    tiny_tokenizer(eos_token="<eos>", pad_token="a").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 1


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizerFast", "NoSuchOne"])
def test_pre_tokenizer_survives_a_class_name(tmp_path, name, capfd):
    """The real SmolLM2 says GPT2Tokenizer, a class that would drop its digit rule."""
    tiny_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name})
    )
    assert load_tokenizer(tmp_path)("a  12")["input_ids"] == [1, 6, 2, 3]
    assert capfd.readouterr() == ("", "")


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no eos token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="unreadable tokenizer") as e:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_more_ids_than_rows_is_refused(tmp_path, saved):
    tokenizer = tiny_tokenizer(eos_token="<eos>")
    tokenizer.save_pretrained(saved)
    assert len(load_tokenizer(saved)) == 7
    edit_config(saved, vocab_size=6)
    with pytest.raises(ValueError, match="the tokenizer has 7 ids, the model 6"):
        load_tokenizer(saved)
    small = type(CFG)(**{**vars(CFG), "vocab_size": 6})
    with pytest.raises(ValueError, match="the tokenizer has 7 ids, the model 6"):
        save_hf(tmp_path / "x", small, random_params(small), tokenizer)


def test_says_nothing(tmp_path):
    """A fresh process, warnings as errors: not a word about PyTorch, no variable."""
    tiny_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    code = (
        "import os, sys; from jppo.models.tokenizer import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"load_tokenizer({str(tmp_path)!r})\n"
        "assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    )
    env = dict(os.environ)
    env.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=root,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# ── the real one ─────────────────────────────────────────────────────────────


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


def reference_ids(text: str, vocab: dict[str, int], ranks: dict) -> list[int]:
    """Byte-level BPE by its definition: split, then merge the lowest rank first."""
    import regex

    words = (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    letters, ids = byte_letters(), []
    for piece in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(words, piece):
            parts = [letters[b] for b in word.encode()]
            while len(parts) > 1:
                pairs = list(zip(parts, parts[1:], strict=False))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                i = pairs.index(best)
                parts[i : i + 2] = ["".join(best)]
            ids += [vocab[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_by_definition(smollm2_dir, text):
    model = json.loads((smollm2_dir / "tokenizer.json").read_text())["model"]
    ranks = {tuple(merge): i for i, merge in enumerate(model["merges"])}
    tokenizer = load_tokenizer(smollm2_dir)
    ids = tokenizer(text)["input_ids"]
    assert ids == reference_ids(text, model["vocab"], ranks)
    assert tokenizer.decode(ids) == text


def test_smollm2_special_tokens(smollm2_dir):
    tokenizer = load_tokenizer(smollm2_dir)
    chat = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer(chat)["input_ids"] == [1, 4093, 198, 26843, 2, 198]
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert ids == (1, 2, 2)
    assert tokenizer.decode([1, 26843, 2], skip_special_tokens=True) == "Hi"


CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6, of course."},
]


def test_smollm2_chats(smollm2_dir):
    """The marks are exactly on what the policy says, up to its end of turn."""
    tokenizer = load_tokenizer(smollm2_dir)
    example = encode_example(tokenizer, {"messages": CHAT})
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example.ids) == whole
    said = [i for i, on in zip(example.ids, example.trained, strict=True) if on]
    assert tokenizer.decode(said) == "4.<|im_end|>\n6, of course.<|im_end|>\n"
    prompt = render_prompt(tokenizer, CHAT[:3])
    assert whole.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")
    (ids,) = encode(tokenizer, [prompt])
    assert ids == example.ids[: len(ids)] and ids[:2] != [1, 1]


@pytest.mark.parametrize("stop", ["\nUser:", "and so on", "日本", "<|im_end|>\n"])
def test_smollm2_stop_strings(smollm2_dir, stop):
    """Wherever token borders lie: the fewest tokens that hold the string are kept."""
    tokenizer = load_tokenizer(smollm2_dir)
    assert stop_strings(tokenizer, (stop,)) == (stop,)
    text = f"naïve 🙂{stop}, then more and {stop} again."
    ids = np.array(encode(tokenizer, [text]))
    mask = np.ones_like(ids, bool)
    cut, which = trim_at_stop_strings(tokenizer, ids, mask, ["never", stop])
    kept = ids[0][cut[0]].tolist()
    assert which.tolist() == [1] and cut[0, : len(kept)].all()
    assert stop in tokenizer.decode(kept)
    assert stop not in tokenizer.decode(kept[:-1])
    assert len(tokenizer.decode(kept)) <= text.index(stop) + len(stop) + 8
