"""A byte-level BPE tokenizer of 512 tokens, made without a corpus or a download.

Ids 0-3 are the special tokens, 4-259 the 256 bytes, 260-511 merges of two frequent letters, the first of them also
with a space in front. Every text round-trips, and every id from `FIRST_ORDINARY_ID` on stands for at least one byte.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<turn>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
FIRST_ORDINARY_ID = len(SPECIAL_TOKENS)
VOCAB_SIZE = 512

_LETTERS = "etaoinsrhldcumfp"
_SPACE = "Ġ"  # how byte-level BPE writes a space
_CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer; the same one on every call."""
    alphabet = sorted(ByteLevel.alphabet())
    pairs = [*product(_SPACE, _LETTERS), *product(_LETTERS, _LETTERS)]
    merges = pairs[: VOCAB_SIZE - FIRST_ORDINARY_ID - len(alphabet)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_settings(context_tokens: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, which AutoTokenizer reads beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
