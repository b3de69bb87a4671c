"""The live page of a run: `diloco web`.

`feed.py` keeps what the shards said, `app.py` serves it and says to whom, `live_page.py` puts them together, and
`command.py` starts them. What a browser gets lies in `static/`.
"""
