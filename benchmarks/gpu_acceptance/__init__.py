"""The acceptance of a GPU by one command: every path that needs one, each step in a process of its own.

    python -m benchmarks.gpu_acceptance [--rehearse] [--steps NAME …] [--out DIR]

`setting` has the model and the batch, `runner` runs steps and writes their records, `steps` lists them.
"""
