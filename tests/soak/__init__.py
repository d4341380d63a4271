"""The soak: thousands of jobs, a chaos loop, and a checker that proves what the database says.

``python -m tests.soak`` (``make soak``) starts private servers, workers and beat; ``load`` sends
jobs, ``chaos`` does harm, both from one seed. Then the harm stops, everything is put right, and
``checker`` looks for one violation of the guarantees in what ``evidence`` read: the store's tables,
the witness table that the jobs and triggers wrote to, and Celery's result backend.
"""
