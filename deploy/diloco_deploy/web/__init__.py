"""The live page of a run: `diloco web`.

`feed.py` keeps what the shards said, `app.py` serves it and controls access, `live_page.py` connects them, and
`command.py` starts them. `static/` holds the browser's files.
"""
