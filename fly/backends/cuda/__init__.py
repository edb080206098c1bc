"""CUDA: whole rounds as captured graphs, one wait of the host a round.

Nothing is imported here: torch's attention kernels load slowly, and only where there is such a device are they needed.
"""
