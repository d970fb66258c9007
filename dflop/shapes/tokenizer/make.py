"""Make the shipped tokenizer: `python -m dflop.shapes.tokenizer.make` writes its two JSON files beside this one.

Run it after any change to the demo's wording or to `corpus.txt`; a test fails if that was forgotten. The tokenizer is
trained on the project's own text alone: the demo dataset's conversations and `corpus.txt`, a few pages of plain English
captions, questions and numbers. Any UTF-8 text round-trips, for every byte is a token; the text is not normalised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflop.demo import conversation_texts

__all__ = ["SPECIAL_TOKENS", "VOCAB_SIZE", "train_tokenizer", "write_tokenizer"]

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<audio>")
HERE = Path(__file__).parent

# Qwen2's rule: contractions, words with their leading space, single digits, punctuation, line breaks, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEMO_SEEDS = range(4)
DEMO_RECORDS = 400
# The demo repeats a few hundred words. So each of its sentences is used once, with several copies of the corpus, which
# leaves room in the vocabulary for the words of ordinary captions.
CORPUS_COPIES = 8
# Every message of a chat opens with one of these, so each becomes one token.
ROLES = "system\nuser\nassistant\n"


def train_tokenizer() -> Tokenizer:
    """The byte-level BPE with `VOCAB_SIZE` tokens; the same for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; the chat template beside them is written by hand."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": {f"{kind}_token": f"<{kind}>" for kind in ("image", "video", "audio")},
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer.json", train_tokenizer().to_str() + "\n")
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _training_texts() -> Iterator[str]:
    demo_texts = {text for seed in DEMO_SEEDS for text in conversation_texts(DEMO_RECORDS, seed)}
    for text in sorted(demo_texts):
        yield text
        yield ROLES
    corpus = (HERE / "corpus.txt").read_text(encoding="utf-8")
    for _ in range(CORPUS_COPIES):
        yield corpus


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


if __name__ == "__main__":
    write_tokenizer(HERE)
