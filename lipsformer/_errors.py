"""The error for a user's mistake, and other libraries' errors in one line."""


class ConfigError(ValueError):
    """A user's mistake. The message names the setting, its value and what is allowed."""


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text, or the error's class if it has no text.

    Example:
        >>> from lipsformer._errors import first_line
        >>> first_line(ValueError("there is no such size\n(a long explanation)"))
        'there is no such size'
        >>> first_line(KeyboardInterrupt())
        'KeyboardInterrupt'
    """
    return str(error).partition("\n")[0] or type(error).__name__
