"""Usage: what the user wrote cannot be done, said in one line.

Every part of lm refuses in this way, and the command line prints that line alone, without a
traceback, and ends with exit code 2.
"""

from typing import Any


class UsageError(ValueError):
    """What the user wrote cannot be done: one line, and exit code 2 on the command line."""


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its name if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0]


def require(holds: Any, otherwise: str) -> None:
    """Raises UsageError with `otherwise` unless `holds`."""
    if not holds:
        raise UsageError(otherwise)
