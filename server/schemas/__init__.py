"""The one vocabulary: every room may import this package and nothing else of the server."""
