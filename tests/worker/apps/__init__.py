"""The apps that the workers of these tests run."""
