"""Shapes: what the data looks like, read from manifests and media headers, and text as the LLM sees it."""

from dflop.shapes.manifests import Shard, Source, SourceRecords, list_shards, list_sources
from dflop.shapes.profile import ShapeProfiler, profile_shard
from dflop.shapes.reader import ShapeReader
from dflop.shapes.samples import HOW_DRAWN, MediaSizes, Mixture, SampleShapes, load_samples, without_unencoded
from dflop.shapes.text import BUNDLED_TOKENIZER, ChatTokenizer, tokenizer_folder

__all__ = [
    "BUNDLED_TOKENIZER",
    "HOW_DRAWN",
    "ChatTokenizer",
    "MediaSizes",
    "Mixture",
    "SampleShapes",
    "ShapeProfiler",
    "ShapeReader",
    "Shard",
    "Source",
    "SourceRecords",
    "list_shards",
    "list_sources",
    "load_samples",
    "profile_shard",
    "tokenizer_folder",
    "without_unencoded",
]
