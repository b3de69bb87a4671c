"""The live page of a run: `diloco web`.

`asking.py` asks the shards, `feed.py` keeps what they said, `app.py` serves it, `access.py` says to whom, and
`live_page.py` puts them together. What a browser gets lies in `static/`.
"""
