"""A caller that enqueues with each row of its own, and is killed now and then: a process.

``python -m tests.faults.caller NAME FIRST LAST KILLS``: rows ``NAME-FIRST`` to ``NAME-LAST``, one
transaction each. Every ``KILLS``-th one, counted by a random number, it is killed: inside its
transaction, between the commit and the publish, or after the publish.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import sqlalchemy as sa

from celery_lease import events
from tests.faults.ledger import Ledger
from tests.faults.tasks import make_app

ORDERS = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.String(100), primary_key=True))
#: Where it is killed: the first is inside the transaction, the others are events of ours.
PLACES = ("transaction", events.JOB_SUBMITTED, events.JOB_DISPATCHED)


def main(name: str, first: int, last: int, kills: int) -> None:
    """Make the requests."""
    folder, conf = Path(os.environ["FAULTS_FOLDER"]), json.loads(os.environ["FAULTS_CONF"])
    ledger = Ledger(folder)
    engine = sa.create_engine(conf["lease_store_url"])
    task = make_app(conf, folder).tasks["faults.work"]
    place: str | None = None

    def die_at(where: str) -> None:
        if where == place:
            ledger.write("caller killed", where=where)
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(lambda event: die_at(event.name))
    for number in range(first, last):
        order = f"{name}-{number}"
        ledger.write("request", name=name, number=number)
        place = random.choice(PLACES) if random.randrange(kills) == 0 else None
        with engine.connect() as connection:
            connection.execute(sa.insert(ORDERS).values(id=order))
            task.enqueue(connection, kwargs={"plan": {}, "name": order})
            die_at("transaction")
            if random.randrange(10):
                connection.commit()


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
