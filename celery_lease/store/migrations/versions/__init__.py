"""One file a revision, named `NNNN_what.py`; Alembic loads them, nobody imports them."""
