"""The one error class whose message is meant for the person at the keyboard.

Commands print it as one line on stderr and exit with its code. Anything else that is raised is a bug and
keeps its traceback.
"""

import difflib
from collections.abc import Iterable

__all__ = ["ToBeContinued", "UserError", "way_out_of"]


class UserError(ValueError):
    """A mistake the user can mend: the message names the thing, its value and the way out."""

    exit_code = 2


class ToBeContinued(UserError):
    """Not a mistake: the command was asked to stop before its end, saved its progress, and continues when restarted.

    The exit code is EX_TEMPFAIL of sysexits.h, which means that the command should be tried again.
    """

    exit_code = 75


def way_out_of(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The hint for an unknown name: the known name that was probably meant, or else all known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{prefix}{near[0]}`?" if near else f"known here: {', '.join(known)}"
