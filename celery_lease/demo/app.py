"""The demo's Celery app: its settings, and the two tasks that index a package.

Made by a function, since the demo's own process and its workers each make it for one run's
folder (``workers``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery

from celery_lease.demo.gates import Gate, Reached
from celery_lease.demo.indexing import Totals
from celery_lease.demo.library import library_root
from celery_lease.task import LeasedTask

#: Short, so that a vanished worker's job runs again while one looks on; 30 in real life.
LEASE_SECONDS = 4.0
REAPER_SECONDS = 1.0
#: One job may lose both the worker that is killed and the one that is frozen.
MOST_LOSSES = 5
INDEX = "demo.index"
INDEX_TO_THE_END = "demo.index_to_the_end"
HALFWAY = "halfway"
AFTER_THE_LAST_CHECK = "after-the-last-check"


def store_path(folder: Path) -> Path:
    """Return the SQLite file of a run."""
    return folder / "lease.sqlite3"


def gate(folder: Path, name: str) -> Gate:
    """Return a gate of a run."""
    return Gate(folder / "gates", name)


def create_app(folder: Path, broker: str | None) -> Celery:
    """Return the app of one run.

    Args:
        folder: the run's own, for everything that is kept in files.
        broker: a broker's URL, None for files in the folder.
    """
    app = Celery("celery-lease-demo", set_as_current=False)
    app.conf.update(
        broker_url=broker or "filesystem://",
        broker_connection_retry_on_startup=True,
        result_backend=f"file://{_made(folder / 'results')}",
        # Of this run alone, should the broker be shared.
        task_default_queue=folder.name,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        lease_store_url=f"sqlite:///{store_path(folder)}",
        lease_duration=LEASE_SECONDS,
        lease_reaper_interval=REAPER_SECONDS,
        lease_max_attempts=MOST_LOSSES,
        # A killed worker takes what it had fetched with it; these bring it back within seconds.
        lease_queued_timeout=6.0,
        lease_settle_grace=3.0,
    )
    if broker is None:
        app.conf.update(
            broker_transport="celery_lease.demo.broker:Transport",
            broker_transport_options={
                "data_folder_in": str(_made(folder / "queue")),
                "data_folder_out": str(_made(folder / "queue")),
                "control_folder": str(_made(folder / "exchanges")),
                "polling_interval": 0.1,
            },
        )
    _made(folder / "gates")
    _add_tasks(app, folder)
    return app


def _add_tasks(app: Celery, folder: Path) -> None:
    root = library_root()

    # Not shared: Celery would give them to every other app of the process.
    @app.task(  # type: ignore[untyped-decorator]
        base=LeasedTask, bind=True, name=INDEX, shared=False
    )
    def index(self: LeasedTask, files: list[str], stop_at: str | None = None) -> dict[str, Any]:
        """Index a package; a later attempt goes on from the last checkpoint."""
        totals = Totals.from_json(self.lease.last_checkpoint)
        for name in files[totals.files :]:
            self.lease.check()
            totals.add((root / name).read_bytes())
            self.lease.progress(totals.files, len(files))
            self.lease.checkpoint(totals.as_json())
            if stop_at == HALFWAY and totals.files == len(files) // 2:
                gate(folder, HALFWAY).pass_through(_who(self))
        return totals.as_json()

    @app.task(  # type: ignore[untyped-decorator]
        base=LeasedTask, bind=True, name=INDEX_TO_THE_END, lease_interrupt=False, shared=False
    )
    def index_to_the_end(self: LeasedTask, files: list[str]) -> dict[str, Any]:
        """Index a package, deaf after its last check: what a zombie is made of."""
        totals = Totals()
        for name in files:
            self.lease.check()
            totals.add((root / name).read_bytes())
            self.lease.progress(totals.files, len(files))
        gate(folder, AFTER_THE_LAST_CHECK).pass_through(_who(self))
        return totals.as_json()


def _who(task: LeasedTask) -> Reached:
    return Reached(task.lease.job_id, task.lease.fencing_token)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
