"""What ``celery -A tests.faults.dying_worker`` runs: ``tests.worker``'s app, made mortal."""

from tests.faults.dying import make_mortal
from tests.worker.apps.leased import app

__all__ = ["app"]

make_mortal(app)
