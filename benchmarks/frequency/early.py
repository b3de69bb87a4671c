from diloco_server.core.cadence import Rest


def early(rest: Rest) -> int:
    """H = 6 in the first fifth, then H."""
    return 6 if rest.fraction < 0.2 else rest.sync_every
