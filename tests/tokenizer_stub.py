"""A tokenizer without files: words apart by spaces, one id a word."""

import functools
import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

EOS, BOS, UNK = "</s>", "<s>", "<unk>"
WORDS = (EOS, BOS, UNK, "red", "green", "blue", "one", "two", "three", "four", "five")


def make_tokenizer(size=16, *, add_bos=False, eos=EOS, pad=None):
    """Ids 0 … size − 1: `</s> <s> <unk>`, words, then w11, w12, …

    Without `pad` it has no pad token, as many tokenizers of base models. With
    `add_bos` its post-processor puts `<s>` before a text.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=_words(size, add_bos),
        unk_token=UNK,
        eos_token=eos,
        bos_token=BOS if add_bos else None,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _words(size, add_bos):
    names = [*WORDS, *(f"w{i}" for i in range(len(WORDS), size))][:size]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNK)
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        words.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, names.index(BOS))]
        )
    return words
