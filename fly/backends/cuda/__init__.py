"""CUDA: whole rounds as captured graphs, one wait of the host a round.

Nothing is imported here: torch's attention kernels load slowly, and only a CUDA device needs them.
"""
