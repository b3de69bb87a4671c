"""`diloco explain`: what every code means, what to look at and what to do. The pages take their tables from here."""
