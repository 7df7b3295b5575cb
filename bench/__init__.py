"""The benchmark: `python -m bench --help`. What is measured, and how, stands in docs/performance.md."""
