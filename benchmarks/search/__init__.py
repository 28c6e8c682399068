"""How few trials each sampler needs: `python -m benchmarks.search`."""
