"""Database URLs: read, refused with a remedy, and shown without their secrets.

A URL that cannot be read may be one whose password has a character that must be escaped: what
SQLAlchemy says of it repeats a part of it, and so is neither shown nor chained.
"""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from celery_lease.exceptions import SettingError
from celery_lease.masking import mask_url
from celery_lease.store import dialects


def read(url: str) -> tuple[URL, dialects.Dialect]:
    """Return ``lease_store_url`` with its driver, and the dialect of its database.

    Raises:
        SettingError: it cannot be used at all.
    """
    try:
        parsed = dialects.with_driver(make_url(url))
        dialect = dialects.dialect_for(parsed)
    except ArgumentError:
        problem = "lease_store_url is not a database URL: write e.g. postgresql://user@host/name"
        raise SettingError([problem]) from None
    except ValueError as error:
        if isinstance(error, dialects.UnknownDatabase):
            problem = f"lease_store_url: {error}; use one of these four databases"
            raise SettingError([problem]) from error
        problem = "lease_store_url has no number where its port should be: " + _ESCAPE
        raise SettingError([problem]) from None
    if parsed.host and _has_raw_at(url):
        raise SettingError(["lease_store_url has an @ more than it may have: " + _ESCAPE])
    if dialects.is_in_memory(parsed):
        problem = (
            "lease_store_url names an in-memory database, which no other process can "
            "see: give SQLite a file, e.g. sqlite:////var/lib/app/lease.sqlite3"
        )
        raise SettingError([problem])
    return parsed, dialect


_ESCAPE = (
    "in a user name or password write %40 for @, %3A for :, %2F for / and %3F for ? "
    "(urllib.parse.quote_plus does it)"
)


def _has_raw_at(url: str) -> bool:
    # Up to the first @, SQLAlchemy reads it as the password; the rest would be shown as the host.
    place, _, query = url.partition("://")[2].partition("?")
    return place.count("@") > 1 or any("@" in part.partition("=")[0] for part in query.split("&"))


def shown(url: URL) -> str:
    """Return a URL for people, without its secrets."""
    return mask_url(url.render_as_string(hide_password=True))
