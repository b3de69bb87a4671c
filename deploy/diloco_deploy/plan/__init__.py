"""`diloco plan`: settings and sizes of a run from its model, learners and links. Formulas, and no measuring."""
