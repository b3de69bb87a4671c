"""Terminal output about a run: tables, lines, and the final report."""
