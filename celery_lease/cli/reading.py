"""``jobs``, ``show`` and ``attempts``: what the history says. Nothing is changed."""

from __future__ import annotations

import click

from celery_lease import history
from celery_lease.cli import documents, tables, timeline
from celery_lease.cli.command import LeaseCommand, app_of, duration, json_option, limit_option
from celery_lease.cli.output import print_json, print_table, print_text
from celery_lease.states import JobState


@click.command(cls=LeaseCommand)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in JobState]),
    help="Only jobs in this state; may be given several times.",
)
@click.option("--task", help="Only jobs of the task of this name.")
@click.option(
    "--older-than",
    callback=duration,
    metavar="DURATION",
    help="Only jobs recorded at least so long ago.",
)
@click.option(
    "--newer-than",
    callback=duration,
    metavar="DURATION",
    help="Only jobs recorded at most so long ago.",
)
@limit_option
@json_option
@click.pass_context
def jobs(
    ctx: click.Context,
    *,
    states: tuple[str, ...],
    task: str | None,
    older_than: float | None,
    newer_than: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs, the newest first.

    A duration is 90s, 5m, 2h or 1d; ages are by the store's clock.
    """
    app = app_of(ctx)
    found = history.jobs(
        app,
        state=states or None,
        task=task,
        older_than=older_than,
        newer_than=newer_than,
        limit=limit,
    )
    if as_json:
        print_json({"jobs": [documents.job(job) for job in found]})
    else:
        print_table(tables.jobs(found, now=history.now(app)), is_plain=ctx.obj.no_color)


@click.command(cls=LeaseCommand)
@click.argument("job_id", metavar="JOB")
@click.option("--traceback", "with_tracebacks", is_flag=True, help="Also where attempts failed.")
@json_option
@click.pass_context
def show(ctx: click.Context, *, job_id: str, with_tracebacks: bool, as_json: bool) -> None:
    """Show one job: who held its lease when, why each attempt stopped, what was accepted.

    JOB is the Celery task id. Times are the store's; beside them is how far the worker's own
    clock was ahead (+) or behind (-).
    """
    app = app_of(ctx)
    job = history.job(app, job_id)
    now = history.now(app)
    if as_json:
        print_json(documents.job_with_attempts(job, now=now))
        return
    print_text(timeline.heading(job, now=now))
    print_table(timeline.events(job, now=now), is_plain=ctx.obj.no_color)
    if with_tracebacks:
        print_text(timeline.tracebacks(job))


@click.command(cls=LeaseCommand)
@click.option("--job", "job_id", help="Only attempts of this job (its Celery task id).")
@click.option("--worker", help="Only attempts on this node, as in celery@host.")
@click.option("--live/--ended", default=None, help="Only those that hold a lease, or that ended.")
@limit_option
@json_option
@click.pass_context
def attempts(
    ctx: click.Context,
    *,
    job_id: str | None,
    worker: str | None,
    live: bool | None,
    limit: int,
    as_json: bool,
) -> None:
    """List attempts, the newest claim first."""
    app = app_of(ctx)
    found = history.attempts(app, job_id=job_id, worker=worker, live=live, limit=limit)
    now = history.now(app)
    if as_json:
        print_json({"attempts": [documents.attempt(attempt, now=now) for attempt in found]})
    else:
        print_table(tables.attempts(found, now=now), is_plain=ctx.obj.no_color)
