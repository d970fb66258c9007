"""The tokenizer that ships with the package: a byte-level BPE of 1024 tokens with a ChatML template.

This folder is a Hugging Face tokenizer directory. It serves the demo and the tests; token counts of a real model need
that model's own tokenizer. `make.py` trains the bundled one again, with the same bytes as result.
"""
