"""``python -m bench.enqueue WARM JOBS``: enqueue no-op jobs one by one and say how long it took.

After the warm-up jobs (connections, compiled statements) it prints ``warm`` and waits for a line,
so that the counters can be set to zero in between.
"""

from __future__ import annotations

import json
import os
import sys
import time

from bench.app import noop


def main() -> None:
    """Enqueue."""
    warm, jobs = int(sys.argv[1]), int(sys.argv[2])
    for number in range(warm):
        noop.delay(number)
    print("warm", flush=True)
    sys.stdin.readline()
    before = os.times()
    started = time.monotonic()
    for number in range(jobs):
        noop.delay(number)
    seconds = time.monotonic() - started
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu}), flush=True)
    # Nothing is left to be said, and the end of a Python process takes its time.
    os._exit(0)


if __name__ == "__main__":
    main()
