"""Secrets out of what is shown: the one rule for messages, logs, commands and ``repr``.

Not SQLAlchemy's, which hides the password before the host alone: a database URL may have one in
its query too, and one with a raw ``@`` in it is read as another URL.
"""

from __future__ import annotations

import re

MASK = "***"
_SECRET = "pass|pwd|secret|token"  # noqa: S105 - what the name of a password contains
#: In a URL nothing but a secret, or the file of one, is called a key.
_SECRET_PARAMETER = f"{_SECRET}|key|credential"


def names_secret(text: str) -> bool:
    """Tell whether a name, or a text in another form than a URL, speaks of a secret."""
    return re.search(_SECRET, text, re.IGNORECASE) is not None


def mask_url(url: str) -> str:
    """Hide the passwords of a database URL, wherever they stand; in doubt hide more.

    .. versionadded:: 0.1
    """
    if "://" not in url:
        # Not a URL: a file name is harmless, a connection string in another form may not be.
        return MASK if re.search(r"[@=]", url) else url
    # Up to the last @: a password with a raw @, / or ? makes a wrong URL, and is still a password.
    masked = re.sub(r"(://[^:@]*):.*@", rf"\1:{MASK}@", url, count=1, flags=re.DOTALL)
    return re.sub(
        rf"([?&;][^=&;]*(?:{_SECRET_PARAMETER})[^=&;]*=)[^&]*",
        rf"\1{MASK}",
        masked,
        flags=re.IGNORECASE,
    )
