"""A cluster of simulated GPUs: the real loop, scheduling, calls and snapshots, over Workhorses that sleep.

    python -m benchmarks.cluster_sim --gpus 8 64 --params 70e9 [--iterations 3] [--lose-node]

`cost` says how long each call of a Workhorse takes, `workhorse` sleeps for it, `job` lays the models out and runs the
PPO loop, `nodes` has the Ray nodes.
"""
