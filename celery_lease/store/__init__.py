"""The store: jobs, messages and attempts in one SQL database.

The database is the only authority. Every state is left by one guarded UPDATE in
``transitions``; the row count decides, and every instant is written and compared by the
database's own clock. What happens at each failure:

* a runner dies: its lease ends, and ``expire`` gives the job on;
* a reply is lost: the caller repeats the call, or asks its own attempt row what became of it;
* two callers race: one UPDATE changes the row, the other sees zero rows, which is an answer;
* the database is away: ``StoreUnavailable`` after bounded retries, and nothing was half done.

Only this package knows SQLAlchemy, and only ``dialects`` names a database.
"""
