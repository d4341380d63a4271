"""``doctor``: what is wrong, or will be, with an app, its store, its broker and its workers."""

from __future__ import annotations

import click

from celery_lease.cli import checks, facts
from celery_lease.cli.command import LeaseCommand, app_of, json_option
from celery_lease.cli.findings import Finding, Severity, sorted_by_severity
from celery_lease.cli.output import print_json, print_text
from celery_lease.exceptions import SettingError
from celery_lease.extension import extension_of


@click.command(cls=LeaseCommand)
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Look for what is wrong, or will be: store, broker, workers, what waits, and settings.

    Nothing is changed, and no answer takes longer than some seconds. The exit code is 1 when
    there is an error.
    """
    found = sorted_by_severity(_examine(ctx))
    if as_json:
        print_json([finding.document() for finding in found])
    else:
        print_text(line for finding in found for line in _lines(finding))
    if any(finding.severity is Severity.ERROR for finding in found):
        ctx.exit(1)


def _examine(ctx: click.Context) -> list[Finding]:
    try:
        # Finalizing the app reads its settings already.
        extension = extension_of(app_of(ctx))
        extension.check_at_start()
    except SettingError as error:
        return checks.bad_settings(error)
    return checks.findings(facts.gather(extension))


def _lines(finding: Finding) -> list[str]:
    """Return a finding for people: sentences are too long for a table."""
    lines = [f"{finding.severity:<8} {finding.name}: {finding.found}"]
    return lines + ([f"{'':<8} -> {finding.remedy}"] if finding.remedy else [])
