"""How much of a document's content each policy keeps: documents x questions, never seen while compressing.

python -m benchmarks.quality --help
"""
