"""What the first node of a Slurm step tells the others, in files of a folder that all of them see.

Each of the others writes a question with a random number, and the first one answers these very questions. So nothing is
taken for an answer that a command of the same step has left, whether it has ended or was killed. The last words of a
first node that fails before the nodes meet stay in the folder, for nodes that begin later.
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

__all__ = ["hear", "last_words_told", "slurm_nodes", "slurm_rank", "told"]

_BETWEEN_LOOKS_S, _LONGEST_WAIT_S = 0.2, 600
# So long a node waits for the first one to take back last words that may be those of an earlier command of the step.
_TAKEN_BACK_S = 30
# The question of this process, which meets other nodes once.
_NUMBER = secrets.token_hex(8)
# The answers of this process that it has written for all other nodes; these delete their questions when they read one.
_told: set[Path] = set()


def slurm_nodes() -> str | None:
    """The nodes of the Slurm step or job that this runs in, as Slurm writes them; None outside of one."""
    return os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")


def slurm_rank() -> int:
    """The number of this node in the Slurm step, from 0."""
    return int(os.environ.get("SLURM_PROCID", "0"))


@contextlib.contextmanager
def last_words_told(shared: Path) -> Iterator[None]:
    """In a Slurm step of several nodes: an error that ends this block on the first node, before all others have heard
    its word, is raised by `hear` on them. Enter it as the command begins: on other nodes it asks for the word already.

    Outside of such a step it does nothing.
    """
    if int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
        yield
    elif slurm_rank():
        question = _ask(_answer(shared))
        try:
            yield
        finally:
            question.unlink(missing_ok=True)
    else:
        answer = _answer(shared)
        _told.discard(answer)
        for left in shared.glob(".meeting-*"):
            with contextlib.suppress(OSError):  # a colleague's may be neither read nor deleted
                if '"refused"' in (_text_of(left) or ""):
                    left.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            if answer not in _told or _questions(answer):
                is_plain = isinstance(error, (UserError, OSError))
                with contextlib.suppress(OSError):
                    _tell(answer, {"refused": str(error) if is_plain else f"{type(error).__name__}: {error}"})
            raise


@contextlib.contextmanager
def told(shared: Path, num_nodes: int, word: Mapping[str, Any]) -> Iterator[None]:
    """On the first node: wait until all others ask, and tell them `word`, which must be JSON. They can read it while
    the block runs.

    Raises:
        UserError: when others do not ask for ten minutes.
    """
    answer = _answer(shared)
    for name in _questions(answer):  # perhaps an earlier command's: nodes that wait ask again
        answer.with_name(name).unlink(missing_ok=True)
    until = time.monotonic() + _LONGEST_WAIT_S
    while (missing := num_nodes - 1 - len(_questions(answer))) > 0:
        if time.monotonic() > until:
            raise UserError(
                f"{missing} of {num_nodes} nodes have not asked where to meet, in {shared}, for "
                f"{_LONGEST_WAIT_S:.0f} s; see what they say, and check that all nodes see this folder"
            )
        time.sleep(_BETWEEN_LOOKS_S)
    try:
        _tell(answer, word)
        _told.add(answer)
        yield
    finally:
        answer.unlink(missing_ok=True)


def hear(shared: Path) -> Mapping[str, Any]:
    """On another node: ask, and return what the first node tells.

    Raises:
        UserError: with the first node's last words, or when the first node answers nothing for ten minutes.
    """
    answer, refused_since, until = _answer(shared), None, time.monotonic() + _LONGEST_WAIT_S
    try:
        while True:
            question = _ask(answer)
            said = json.loads(_text_of(answer) or '{"to": []}')
            now = time.monotonic()
            if _NUMBER in said["to"]:
                break
            if "refused" not in said:
                refused_since = None
            elif refused_since is None:
                refused_since = now
            elif now > refused_since + _TAKEN_BACK_S:
                break
            if now > until:
                raise UserError(
                    f"the first node has not written {answer} for {_LONGEST_WAIT_S // 60} minutes; see what it says, "
                    "and check that all nodes see this folder"
                )
            time.sleep(_BETWEEN_LOOKS_S)
    finally:
        question.unlink(missing_ok=True)
    if "refused" in said:
        raise UserError(f"the first node has ended: {said['refused']}")
    return said


def _ask(answer: Path) -> Path:
    """The file with this node's question, which another process may have deleted."""
    question = answer.with_name(f"{answer.name}.{slurm_rank()}")
    if _text_of(question) != _NUMBER:
        with written_whole(question) as path:
            path.write_text(_NUMBER, encoding="utf-8")
    return question


def _tell(answer: Path, word: Mapping[str, Any]) -> None:
    """Write the word, to those that have asked."""
    asked = [_text_of(answer.with_name(name)) for name in _questions(answer)]
    with written_whole(answer) as path:
        path.touch(mode=0o600)
        path.write_text(json.dumps({"to": asked, **word}), encoding="utf-8")


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
