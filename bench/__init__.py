"""The measurements: celery-lease beside plain Celery, interleaved in one run (``make bench``).

Not part of the package, and no test: numbers are reported, whatever they are. The private servers
and the worker processes are those of the tests (``tests/support``). Linux only: ``/proc``.

* ``throughput``: enqueue and drain rates, idle latency, CPU, memory, statements and round trips a
  job, one fresh database and one fresh worker a run; ``place`` has the servers.
* ``beat``: what a heartbeat costs, and whether its updates stay on their page (HOT).
* ``past``: claim, complete, a pass and listings on a short and on a long history.
* ``report``: the JSON and the table of ``bench/results/``.
"""
