"""The group ``celery lease``: its commands by name, and nothing of what they do."""

from __future__ import annotations

import click
from celery.bin.base import handle_preload_options

from celery_lease.cli import doctor, operate, reading


@click.group(name="lease")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery has no types
def lease(ctx: click.Context, **preload: object) -> None:
    """Look at leased jobs, and operate the store they are in."""
    # Celery adds the options that an app declares for all commands to this group alone: they
    # are taken here and not by the sub-commands (celery-facts §11).
    del ctx, preload


for command in (
    reading.jobs,
    reading.show,
    reading.attempts,
    operate.cancel,
    operate.resume,
    operate.reap,
    operate.migrate,
    operate.settings,
    doctor.doctor,
    operate.demo,
):
    lease.add_command(command)
