"""verl's whole pipeline on a machine without a GPU."""

MARK = "=== run "
#: Before each of several runs on one start-up, in the log.
BEGIN = MARK + "{} ==="
