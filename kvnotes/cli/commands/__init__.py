"""The commands of `kvnotes`, one module each; `kvnotes.cli.main` lists them.

A module owns its options and what it prints, and imports what is heavy when it runs.
"""
