"""The demo dataset: a small LLaVA-style mix of pictures, clips, melodies and text, drawn on the spot from a seed.

It needs no download and no licence. Its sizes vary like those of real data, and every answer can be seen in the pixels
(or heard in the tones) of its record, so a tiny model can learn from it.
"""

from dflop.demo.dataset import DemoData, make_demo_data
from dflop.demo.records import conversation_texts

__all__ = ["DemoData", "conversation_texts", "make_demo_data"]
