"""A long job and a deploy: asked to stop, it saves where it is and gives itself back."""

import time
from pathlib import Path

from celery import Celery

from celery_lease import LeasedTask

app = Celery("tasks", broker="filesystem://")
app.conf.lease_store_url = "sqlite:///lease.sqlite3"  # a PostgreSQL or MySQL URL for several hosts

# A broker that needs no server; with one of your own, leave this out.
Path("queue").mkdir(exist_ok=True)
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "queue",
    "polling_interval": 0.1,
}


@app.task(base=LeasedTask, bind=True)
def import_rows(self: LeasedTask, rows: int = 60) -> int:
    """Import rows, one after the other, for longer than any deploy wants to wait."""
    for row in range(self.lease.last_checkpoint or 0, rows):
        time.sleep(0.2)  # the work
        print(f"row {row}, by token {self.lease.fencing_token}", flush=True)
        self.lease.checkpoint(row + 1)
        if self.lease.stop_requested:
            self.lease.release()  # raises HandOver: let it pass
    return rows
