"""Sequential statistics on per-prompt values: `confidence_sequence` and, built on it, the verdict's `gate`.

NumPy only. Nothing here knows what a model or an engine is.
"""
