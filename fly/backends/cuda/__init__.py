"""CUDA: whole rounds as captured graphs, one wait of the host a round. What imports nothing of torch's attention kernels,
which load slowly, is ``waits``; the rest is imported where there is such a device."""
