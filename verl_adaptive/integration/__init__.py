"""Everything that knows verl. Nothing outside this package imports it."""
