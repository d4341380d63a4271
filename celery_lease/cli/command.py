"""What the commands share: the app they work on, the options they have, how they fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from celery.bin.base import CeleryCommand, CeleryOption

from celery_lease.exceptions import LeaseError

F = TypeVar("F", bound=Callable[..., Any])

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# As in ``settings``: an instant so long ago is still one on every database.
_LONGEST_SECONDS = 100 * 365 * 86400.0


class LeaseCommand(CeleryCommand):  # type: ignore[misc]  # Celery has no types
    """A command whose known errors are one line on stderr and exit code 1, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except LeaseError as error:
            raise click.ClickException(str(error)) from error


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of an option's ``90s``, ``5m``, ``2h``, ``1d`` or ``1h30m``.

    A bare number is seconds; None without the option.

    Raises:
        click.BadParameter: it is none of these, or more than a century.
    """
    if value is None:
        return None
    seconds = _seconds(value.strip().lower())
    if seconds is None:
        raise click.BadParameter(
            f"{value!r} is not a duration: write 90s, 5m, 2h or 1d", ctx, param
        )
    if seconds > _LONGEST_SECONDS:
        raise click.BadParameter(f"{value!r} is more than a century", ctx, param)
    return seconds


def app_of(ctx: click.Context) -> Any:
    """Return the app that ``-A`` names, with its modules imported.

    Raises:
        click.UsageError: there is none. Celery then gives its ``default`` app, which has no
            settings: what it would show is not what anybody asked for.
    """
    app = ctx.obj.app
    if app.main == "default" and ctx.find_root().params.get("app") is None:
        raise click.UsageError(
            "name your Celery app: celery -A yourapp lease "
            f"{ctx.info_name} (only `celery lease demo` works without one)",
            ctx,
        )
    app.loader.import_default_modules()
    app.finalize()
    return app


def json_option(command: F) -> F:
    """Add ``--json``."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        cls=CeleryOption,
        help_group="Output",
        help="One JSON document on stdout; instants are ISO 8601 in UTC, durations seconds.",
    )(command)


def limit_option(command: F) -> F:
    """Add ``--limit``."""
    return click.option(
        "--limit",
        type=click.IntRange(min=1, max=100_000),
        default=100,
        show_default=True,
        help="How many at most.",
    )(command)


def _seconds(text: str) -> float | None:
    number = r"\d+(?:\.\d+)?"
    if re.fullmatch(number, text, re.ASCII):
        return float(text)
    if not re.fullmatch(rf"(?:{number}[smhd])+", text, re.ASCII):
        return None
    parts = re.findall(rf"({number})([smhd])", text, re.ASCII)
    return sum(float(amount) * _UNITS[unit] for amount, unit in parts)
