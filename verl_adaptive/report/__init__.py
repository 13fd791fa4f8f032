"""What a run knows, made ready for people: columns, conditions, history, and the HTML report."""
