"""The demo policy's tokenizer: byte-level BPE with Qwen3's special tokens, plus block and scaffold tokens that never contain one of them.

A space is its own token and punctuation is one token per character, so a name is the same token wherever it stands and copying is plain
induction. `decode(encode(x)) == x` for every text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.vocabulary import CONTROL, SPECIALS, add_specials

_SPLIT = r"\p{L}+|\p{N}{1,2}| |\n+|//|[^\s\p{L}\p{N}]|[^\S\n ]+"


def build(texts: Iterable[str], blocks: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Learn merges on `texts` outside the blocks, each of which is one token. Raises ValueError when one contains a special token."""
    fixed = sorted(set(blocks), key=lambda text: (-len(text), text))
    if bad := next((text for text in fixed if any(special in text for special in SPECIALS)), None):
        raise ValueError(f"a block contains a special token: {bad[:80]!r}")
    corpus = [part for text in texts for part in _outside(text, [*SPECIALS, *fixed])]
    corpus += [" ".join(map(str, range(100)))] * 20
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    # The trainer marks every special token as such; add them again with Qwen3's flags.
    plain = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "added_tokens": []}))
    add_specials(plain, fixed)
    return plain


def bootstrap() -> Tokenizer:
    """Special tokens and bytes only: enough to render any conversation to ids and decode it to text."""
    return build([], [], vocab_size=len(SPECIALS) + 256)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """As a transformers tokenizer; `save_pretrained` writes what `AutoTokenizer` loads."""
    end, pad = CONTROL[2], CONTROL[0]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False)


def _outside(text: str, fixed: Sequence[str]) -> list[str]:
    for token in fixed:
        text = text.replace(token, "\0")
    return [part for part in text.split("\0") if part]
