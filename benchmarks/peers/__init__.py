"""The engine and its peers side by side on two CPU ranks: time and peak memory of one optimizer step.

Run by `make bench-engine`, in an environment of its own that holds the peers. `plan` says what is compared, `worker` is
one rank of one engine, `live` its far end, `__main__` lets engines take turns, `results` makes figures of the turns.
"""
