"""Byte-level BPE tokenizers with Qwen3's special tokens, made on the spot: every text has ids, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Flagged special in Qwen3; decoding may skip them."""
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added but not special in Qwen3: decoding keeps them."""
SPECIALS = CONTROL + MARKUP
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""What Qwen3.5 has besides, as control tokens."""


def byte_level(merges: Sequence[tuple[str, str]] = (), *, split_words: bool = False, control: Sequence[str] = ()) -> Tokenizer:
    """Single bytes, then what each merge makes, in order (written in the byte-level alphabet), then the special tokens and more `control`.

    `split_words` keeps merges within GPT-2's words.
    """
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    add_specials(tokenizer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def add_specials(tokenizer: Tokenizer, more: Sequence[str] = ()) -> None:
    """Qwen3's special tokens with Qwen3's flags behind what the tokenizer has; `more` texts become one token each, like its markup."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in (*MARKUP, *more)])
