"""The demo dataset: a small LLaVA-style mix of pictures, clips, melodies and text, drawn on the spot from a seed.

It needs no download and no licence, spreads in size like real data, and is honest: every answer can be read off the
pixels (or tones) of its record, so a tiny model learns from it.
"""

from dflop.data.demo.dataset import DemoData, make_demo_data
from dflop.data.demo.records import conversation_texts

__all__ = ["DemoData", "conversation_texts", "make_demo_data"]
