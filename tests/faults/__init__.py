"""Faults that are real: processes killed and frozen, cables cut, servers restarted.

One file a kind of case (``cases.md``). Each test looks at three witnesses: the store's rows, what
Celery published, and a ledger that the bodies append to.
"""
