"""All tables of the page."""

from what_works import frameworks, layouts, loaders, models, optimizers, precision, values, wrappers
from what_works.script import Cases

TABLES: dict[str, Cases] = {
    "Optimizers": optimizers.CASES,
    "Precision": precision.CASES,
    "Models": models.CASES,
    "Parameters and their layout": layouts.CASES,
    "Wrappers": wrappers.CASES,
    "Values that change between steps": values.CASES,
    "Data and processes": loaders.CASES,
    "Frameworks": frameworks.CASES,
}
"""Heading of a table -> its lines."""
