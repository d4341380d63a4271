"""The tests. A package, so that workers started as processes find ``tests.…`` modules."""
