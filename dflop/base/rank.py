"""The program that torchrun starts on every rank: `python -m dflop.base.rank MODULE REQUEST`, with REQUEST as JSON.

It calls `main(request)` of the module. A `UserError` is printed in one line, with exit code 2; any other error with its
traceback, with exit code 1. Loader processes import this file again, as `__mp_main__`, and nothing of the module.

While modules are imported, no garbage is collected: torch and transformers make millions of objects, and hardly any
garbage. To look for it takes a quarter of the import.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from types import ModuleType
from typing import NoReturn

from dflop.base.errors import UserError

__all__ = ["main"]

# How long a node's other ranks leave it to the first to say why they end.
_FIRST_SAYS_S = 5.0
# A rank whose peer has died ends so much later. torchrun, which looks ten times a second, sees the peer first.
_SEEN_S = 1.0

if __name__ == "__mp_main__":  # a loader, which collects garbage as soon as it begins
    gc.disable()


def main() -> None:
    module, request = sys.argv[1:]
    try:
        _imported(module).main(json.loads(request))
    except UserError as error:
        _say_once(error)
        _end(2)
    except Exception:
        traceback.print_exc()
        time.sleep(_SEEN_S)
        _end(1)


def _imported(name: str) -> ModuleType:
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return module


def _say_once(error: UserError) -> None:
    """Print why this rank ends. A node's ranks mostly fail alike: the first says it and ends, so that torchrun ends the
    others while they wait here. Where it does not, they say it themselves."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_SAYS_S)
    print(f"dflop: {error}", file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """End this process at once: where it fails, others may still wait for it, and NCCL would wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
