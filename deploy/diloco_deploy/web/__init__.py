"""The live page of a run: `diloco web`.

`feed.py` keeps what the shards said, `app.py` serves it, `access.py` says to whom, and `live_page.py` puts them
together. What a browser gets lies in `static/`.
"""
