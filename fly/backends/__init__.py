"""What runs a model: one folder or file a kind of device."""
