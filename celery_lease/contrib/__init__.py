"""What fits celery-lease into other packages: each module needs its package to be installed."""
