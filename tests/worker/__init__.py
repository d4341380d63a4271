"""Tests with real workers and a real broker, through pytest-celery's own fixtures."""
