"""Tests of the harness itself: what other tests rest on must be known to hold."""
