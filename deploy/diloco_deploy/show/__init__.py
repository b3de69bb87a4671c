"""What a person sees of a run on a terminal: tables, lines, the report at its end."""
