"""Fuzzing of what reads bytes from other ranks: see README.md in this folder."""
