"""A report is built page by page; whoever loses its worker goes on from the last page."""

import time
from pathlib import Path

from celery import Celery

from celery_lease import LeasedTask

app = Celery("tasks", broker="filesystem://")
app.conf.lease_store_url = "sqlite:///lease.sqlite3"  # a PostgreSQL or MySQL URL for several hosts
app.conf.lease_reaper_interval = 1  # short, like the lease below, for who is looking on

# A broker that needs no server; with one of your own, leave this out.
for folder in ("queue", "pages"):
    Path(folder).mkdir(exist_ok=True)
app.conf.broker_transport_options = {
    "data_folder_in": "queue",
    "data_folder_out": "queue",
    "control_folder": "queue",
    "polling_interval": 0.1,
}


@app.task(base=LeasedTask, bind=True, lease_duration=5)
def build(self: LeasedTask, report: str, pages: int = 20) -> int:
    """Write a report's pages; return how many there are."""
    for page in range(self.lease.last_checkpoint or 0, pages):
        self.lease.check()  # raises LeaseLost: somebody else has the job now
        write(report, page, token=self.lease.fencing_token)
        self.lease.progress(page + 1, pages)
        self.lease.checkpoint(page + 1)
    return pages


def write(report: str, page: int, *, token: int) -> None:
    """Write one page: the same file however often, so doing it twice does no harm."""
    time.sleep(0.3)  # the work
    Path("pages", f"{report}-{page:03}.txt").write_text(f"page {page}, by token {token}\n")
