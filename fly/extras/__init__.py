"""Programs and bridges beside the core, which imports none of them. Each has a README. ``statistics`` is for all of
them."""
