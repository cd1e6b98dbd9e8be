"""Errors and warnings about the data, and what they quote of other errors.

Every message is one line.
"""


class DataError(ValueError):
    """The data cannot be used; the message says what was found, where, and what is expected."""


class DataWarning(UserWarning):
    """The data are used otherwise than their owner may expect. Commands print only its message."""


class UnreadableImageError(DataError):
    """One image cannot be read; the message names its file and the reason."""


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text, or the error's class if it has no text.

    The library has the same function for itself, because only `data/build.py` imports from it.

    Example:
        >>> from data.errors import first_line
        >>> first_line(ValueError("there is no such size\n(a long explanation)"))
        'there is no such size'
        >>> first_line(KeyboardInterrupt())
        'KeyboardInterrupt'
    """
    return str(error).partition("\n")[0] or type(error).__name__
