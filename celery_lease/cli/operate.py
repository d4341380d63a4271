"""What an operator runs: ``cancel``, ``resume``, ``reap``, ``migrate``, ``settings``, ``demo``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from celery_lease.cli import tables
from celery_lease.cli.command import LeaseCommand, app_of, json_option
from celery_lease.cli.output import print_json, print_table, print_text, printable
from celery_lease.exceptions import JobNotFound
from celery_lease.extension import Extension, extension_of, is_leased, run_pass, settings_of
from celery_lease.settings import as_rows
from celery_lease.states import JobState
from celery_lease.store import migrations, results, transitions

_reason = click.option("--reason", required=True, help="Who says so, and why; kept on the job.")


@click.command(cls=LeaseCommand)
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@_reason
@json_option
@click.pass_context
def cancel(ctx: click.Context, *, job_ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """End jobs that are not final yet; running bodies are interrupted at their next heartbeat."""
    extension = extension_of(app_of(ctx))
    done: list[str] = []
    refused: list[tuple[str, JobState | None]] = []
    try:
        for job_id in dict.fromkeys(job_ids):
            answer = transitions.cancel_now(extension.store, job_id, reason=reason)
            if answer.is_new:
                done.append(job_id)
            else:
                refused.append((job_id, answer.state))
    finally:
        # Also if the store goes away half way: those have ended.
        _report(done, refused, as_json=as_json)
    extension.reaper().settle_many(done)
    if refused:
        sys.exit(1)


def _report(done: list[str], refused: list[tuple[str, JobState | None]], *, as_json: bool) -> None:
    """Say of each job whether it is cancelled now; what was not is for stderr."""
    if as_json:
        print_json(
            {
                "jobs": [
                    *(
                        {"job": one, "state": JobState.CANCELLED.value, "ended_now": True}
                        for one in done
                    ),
                    *(
                        {
                            "job": one,
                            "state": None if reached is None else reached.value,
                            "ended_now": False,
                        }
                        for one, reached in refused
                    ),
                ]
            }
        )
        return
    print_text([f"{one} is {JobState.CANCELLED}" for one in done])
    for job_id, reached in refused:
        if reached is None:
            problem = str(JobNotFound(job_id))
        else:
            problem = f"job {job_id} is {reached}: nothing was changed; it has ended already"
        click.echo(f"Error: {printable(problem)}", err=True)


@click.command(cls=LeaseCommand)
@click.argument("job_id", metavar="JOB")
@_reason
@json_option
@click.pass_context
def resume(ctx: click.Context, *, job_id: str, reason: str, as_json: bool) -> None:
    """Run a held or a final job again; its attempts are kept, its counts begin anew."""
    extension = extension_of(app_of(ctx))
    reached = transitions.resume(
        extension.store,
        job_id,
        reason=reason,
        retention_seconds=_retention_seconds(extension, job_id),
    )
    if reached is None:
        raise JobNotFound(job_id)
    if reached is not JobState.QUEUED:
        problem = f"job {job_id} is {reached}: nothing was changed; {_no_resume(reached)}"
        raise click.ClickException(problem)
    if as_json:
        print_json({"job": job_id, "state": reached.value})
    else:
        print_text([f"{job_id} is {reached}"])
    extension.reaper().send_now(job_id)


def _retention_seconds(extension: Extension, job_id: str) -> float | None:
    """Return how long a job of this one's task holds its key after success."""
    found = results.standing(extension.store, job_id)
    task = None if found is None else extension.app.tasks.get(found.task)
    if task is None or not is_leased(task):
        return extension.settings.idempotency_retention
    return extension.settings_for(task).idempotency_retention_seconds


def _no_resume(reached: JobState) -> str:
    if not reached.is_final and reached is not JobState.HELD:
        return "it has not ended; to begin anew, cancel it first"
    return (
        "another job has its idempotency key, or Celery has not been told of its end yet: see "
        "'celery lease timeline', wait for that, and try again; what was never sent has no "
        "arguments here: submit it anew"
    )


@click.command(cls=LeaseCommand)
@json_option
@click.pass_context
def reap(ctx: click.Context, *, as_json: bool) -> None:
    """Run one pass of the reaper now, for cron or by hand; safe beside others."""
    done = run_pass(app_of(ctx))
    if as_json:
        print_json({"counts": dict(done.counts), "seconds": done.seconds})
        return
    counted = ", ".join(f"{kind} {count}" for kind, count in sorted(done.counts.items()) if count)
    print_text([counted or "nothing to do"])


@click.command(cls=LeaseCommand)
@json_option
@click.pass_context
def migrate(ctx: click.Context, *, as_json: bool) -> None:
    """Create the store's tables, or bring them to what this release needs."""
    store = extension_of(app_of(ctx)).raw_store
    found, reached = migrations.migrate(store)
    if as_json:
        print_json({"from": found, "to": reached})
    elif found == reached:
        print_text([f"{store.masked_url} is at revision {reached}: nothing to do"])
    else:
        print_text([f"{store.masked_url}: {found or 'no tables'} -> {reached}"])


@click.command(cls=LeaseCommand)
@json_option
@click.pass_context
def settings(ctx: click.Context, *, as_json: bool) -> None:
    """Show the settings in force; passwords are masked."""
    rows = as_rows(settings_of(app_of(ctx)))
    if as_json:
        print_json({"settings": [asdict(row) for row in rows]})
    else:
        print_table(tables.settings(rows), is_plain=ctx.obj.no_color)


@click.command(cls=LeaseCommand)
@click.option("--broker", help="A broker's URL, instead of the one that comes with the demo.")
@click.option("--keep", is_flag=True, help="Keep the folder with store, logs and messages.")
@json_option
def demo(*, broker: str | None, keep: bool, as_json: bool) -> None:
    """Show a worker being killed and its job going on elsewhere; needs no app."""
    sys.exit(_demo()(broker=broker, keep=keep, json=as_json))


def _demo() -> Callable[..., Any]:
    """Return the demo; it starts processes and is loaded by nothing else."""
    main: Callable[..., Any] = importlib.import_module("celery_lease.demo").main
    return main
