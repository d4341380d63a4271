"""What the tests stand on: private servers, processes to kill, and a way to wait.

Nothing here knows celery_lease. Tests import from the modules; the fixtures are in
``tests/conftest.py``.
"""
