"""Data: manifests, media headers and sample shapes; text, decoding and packing for training.

`loading` needs torch and is imported by the trainer alone.
"""

from dflop.data.manifest import Shard, Source, list_shards, list_sources, read_manifest
from dflop.data.profile import profile_records
from dflop.data.samples import SampleShapes, load_samples
from dflop.data.text import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "SampleShapes",
    "Shard",
    "Source",
    "list_shards",
    "list_sources",
    "load_samples",
    "profile_records",
    "read_manifest",
]
