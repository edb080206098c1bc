"""Rules of fly inside other engines."""
