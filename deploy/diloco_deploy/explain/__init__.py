"""`diloco explain`: the meaning of every code, and what to do. Parts of the documentation are generated from it."""
