"""What the first rank would do and each rank after it again, done once by the server before it forks any: modules that
are imported where they are first needed, the schema of configs, and what numba sets up before its first kernel."""

import faulthandler
import gc

import pyarrow  # noqa: F401
import scipy.signal  # noqa: F401
import torch.distributed.checkpoint.filesystem
import torch.utils.tensorboard  # noqa: F401
from PIL import Image
from transformers.models.internvl import modeling_internvl  # noqa: F401
from transformers.models.llava_onevision import modeling_llava_onevision  # noqa: F401
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
from transformers.models.siglip import modeling_siglip  # noqa: F401

from dflop.config import load_config
from dflop.costs import measure
from dflop.plan import Grid, Plan
from dflop.step import make_program

faulthandler.enable()  # as ranks do: one that dies in compiled code says where its threads are
Image.init()
# A measurement first fills the last-level cache, 480 MiB of some servers. That takes longer than what tests measure.
measure._cache_bytes = lambda device: 1 << 20
load_config()
make_program(Plan(placement="monolithic", grids=(Grid(module="llm", num_ranks=2, pp=2),), num_microbatches=2))
gc.collect()
gc.freeze()  # ranks look through none of this for garbage, and so copy none of its pages

import duckdb  # noqa: E402, F401 (of what is frozen, it would complain at the server's end)
