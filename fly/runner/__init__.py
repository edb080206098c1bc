"""What a forward works on: requests and their settings, the seam to a backend, and the runner that pairs it with a
cache."""
