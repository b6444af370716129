"""The command line: reads scenarios, calls `Session`, prints what came of it.

Owns argv, the scenario format, both output formats and the mapping of errors to exit
codes. Sees no tensors; torch is imported when a model is loaded, not before.
"""
