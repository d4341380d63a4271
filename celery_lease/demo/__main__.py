"""``python -m celery_lease.demo``: the same as ``celery lease demo``."""

from __future__ import annotations

import argparse
import sys

from celery_lease.demo import main


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="celery lease demo",
        description="Kills one worker in mid-job, freezes another past its lease, and checks "
        "that every job still counted exactly once.",
    )
    parser.add_argument("--broker", metavar="URL", help="a broker instead of the embedded one")
    parser.add_argument("--keep", action="store_true", help="keep the folder with store and logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object, at the end")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    sys.exit(main(arguments.broker, keep=arguments.keep, json=arguments.json))
