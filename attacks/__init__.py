"""Attempts of a hostile rank, each with what must happen: ``python -m attacks [NAME]``."""
