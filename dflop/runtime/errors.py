"""The one error class whose message is meant for the person at the keyboard.

Commands print it as one line on stderr and exit with code 2. Anything else that is raised is a bug and
keeps its traceback.
"""

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake the user can mend: the message names the thing, its value and the way out."""
