"""Data: manifests, media headers and sample shapes; text, decoding and packing for training.

`loading` and `measure_loading` need torch, so this package does not import them; their callers do.
"""

from dflop.data.loading_times import LoadingTimes, read_loading_times
from dflop.data.manifests import Shard, Source, SourceRecords, list_shards, list_sources
from dflop.data.profile import ShapeProfiler, profile_shard
from dflop.data.samples import MediaSizes, SampleShapes, load_samples, without_unencoded
from dflop.data.shapes import ShapeReader
from dflop.data.text import BUNDLED_TOKENIZER, ChatTokenizer, tokenizer_folder

__all__ = [
    "BUNDLED_TOKENIZER",
    "ChatTokenizer",
    "LoadingTimes",
    "MediaSizes",
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
    "read_loading_times",
    "tokenizer_folder",
    "without_unencoded",
]
