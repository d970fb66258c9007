"""What the first node of a Slurm step tells the others, in files of a folder that all of them see.

Each of the others writes a question with a random number, and the first one answers these very questions. So nothing is
taken for an answer that a command of the same step has left, whether it has ended or was killed.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop.base.artifacts import written_whole
from dflop.base.errors import UserError

__all__ = ["hear", "refusals_told", "slurm_nodes", "slurm_rank", "told"]

_BETWEEN_LOOKS_S, _LONGEST_WAIT_S, _LONGEST_REFUSAL_S = 0.2, 600, 60


def slurm_nodes() -> str | None:
    """The nodes of the Slurm step or job that this runs in, as Slurm writes them; None outside of one."""
    return os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")


def slurm_rank() -> int:
    """The number of this node in the Slurm step, from 0."""
    return int(os.environ.get("SLURM_PROCID", "0"))


@contextlib.contextmanager
def told(shared: Path, num_nodes: int, word: Mapping[str, Any], longest_wait_s: float | None = None) -> Iterator[None]:
    """On the first node: wait until all others ask, and tell them `word`, which must be JSON. They can read it while
    the block runs.

    Raises:
        UserError: when others do not ask for ten minutes, or `longest_wait_s`.
    """
    answer = _answer(shared)
    for name in _questions(answer):  # perhaps an earlier command's: nodes that wait ask again
        answer.with_name(name).unlink(missing_ok=True)
    limit_s = _LONGEST_WAIT_S if longest_wait_s is None else longest_wait_s
    until = time.monotonic() + limit_s
    while len(names := _questions(answer)) < num_nodes - 1:
        if time.monotonic() > until:
            raise UserError(
                f"{num_nodes - 1 - len(names)} of {num_nodes} nodes have not asked where to meet, in {shared}, for "
                f"{limit_s:.0f} s; see what they say, and check that all nodes see this folder"
            )
        time.sleep(_BETWEEN_LOOKS_S)
    try:
        with written_whole(answer) as path:
            path.touch(mode=0o600)
            asked = [_text_of(answer.with_name(name)) for name in names]
            path.write_text(json.dumps({"to": asked, **word}), encoding="utf-8")
        yield
    finally:
        answer.unlink(missing_ok=True)


@contextlib.contextmanager
def refusals_told(shared: Path, num_nodes: int) -> Iterator[None]:
    """A UserError of the first node in this block is raised by `hear` on the others, too; they would wait for it."""
    try:
        yield
    except UserError as error:
        if num_nodes > 1 and slurm_nodes() and slurm_rank() == 0:
            with contextlib.suppress(UserError), told(shared, num_nodes, {"refused": str(error)}, _LONGEST_REFUSAL_S):
                until = time.monotonic() + _LONGEST_REFUSAL_S
                while _questions(_answer(shared)) and time.monotonic() < until:
                    time.sleep(_BETWEEN_LOOKS_S)
        raise


def hear(shared: Path) -> Mapping[str, Any]:
    """On another node: ask, and return what the first node tells.

    Raises:
        UserError: with the first node's refusal, or when the first node answers nothing for ten minutes.
    """
    answer, number = _answer(shared), secrets.token_hex(8)
    question = answer.with_name(f"{answer.name}.{slurm_rank()}")
    until = time.monotonic() + _LONGEST_WAIT_S
    try:
        while number not in (said := json.loads(_text_of(answer) or '{"to": []}'))["to"]:
            if _text_of(question) != number:
                with written_whole(question) as path:
                    path.write_text(number, encoding="utf-8")
            if time.monotonic() > until:
                raise UserError(
                    f"the first node has not written {answer} for {_LONGEST_WAIT_S // 60} minutes; see what it says, "
                    "and check that all nodes see this folder"
                )
            time.sleep(_BETWEEN_LOOKS_S)
    finally:
        question.unlink(missing_ok=True)
    if "refused" in said:
        raise UserError(said["refused"])
    return said


def _answer(shared: Path) -> Path:
    """The file of this step. A job that Slurm has put back into its queue keeps its number."""
    shared.mkdir(parents=True, exist_ok=True)
    step = ".".join(os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return shared / f".meeting-{step}"


def _questions(answer: Path) -> list[str]:
    return [name for name in os.listdir(answer.parent) if name.startswith(f"{answer.name}.")]


def _text_of(path: Path) -> str | None:
    """The content of a file; None if it is not there."""
    if path.name not in os.listdir(path.parent):  # NFS looks anew at what is listed
        return None
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:  # it was deleted meanwhile
        return None
