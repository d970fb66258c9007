"""The one error class whose message is meant for the person at the keyboard.

Commands print it as one line on stderr and exit with its code. Anything else that is raised is a bug and
keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable

__all__ = ["ToBeContinued", "UserError", "printable", "way_out_of"]

# Control characters, signs that turn the direction of writing, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text from the data with escapes for what could steer a terminal, e.g. `\\x1b` for the sign that ESC sends."""
    return _UNPRINTABLE.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


class UserError(ValueError):
    """A mistake the user can mend: the message names the thing, its value and the way out.

    Messages often hold names and texts of the data, and are printed: what could steer a terminal is escaped.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))


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
