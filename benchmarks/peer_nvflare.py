"""Peer of peers.py: NVFlare, a FedAvg round of NumPy arrays, in its simulator with a process per client.

A round, as a client sees it: from the arrival of one global model to the arrival of the next. The client returns the
model at once. So the time consists of transfer, aggregation, the server's copy on disk, and the clients' polling.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from peer_processes import answer, read_options

TIMES = "times-"
"""Prefix of the files with arrival times, one file per client, one time per line."""


def client(folder: Path) -> None:
    """Each client's training script, run by the simulator."""
    import nvflare.client as flare

    flare.init()
    with Path(folder, TIMES + flare.get_site_name()).open("a", buffering=1) as times:
        while flare.is_running():
            model = flare.receive()
            if model is None:
                return
            times.write(f"{time.time()}\n")  # NVFlare turns print into logging
            flare.send(flare.FLModel(params=model.params))


def main() -> None:
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    from nvflare.recipe import SimEnv

    options = read_options()
    with tempfile.TemporaryDirectory() as folder:
        initial = Path(folder, "initial.npy")
        np.save(initial, np.random.default_rng(0).standard_normal(options.params, dtype=np.float32))
        recipe = NumpyFedAvgRecipe(
            name="round", min_clients=options.learners, num_rounds=options.rounds + 2, initial_ckpt=str(initial),
            train_script=__file__, train_args=f"--client {folder}",
        )  # fmt: skip
        recipe.execute(SimEnv(num_clients=options.learners, workspace_root=folder))
        arrivals = [[float(line) for line in path.read_text().split()] for path in Path(folder).glob(TIMES + "*")]
    assert len(arrivals) == options.learners, f"{len(arrivals)} clients took part"
    last = [max(each) for each in zip(*arrivals, strict=True)]
    seconds = [b - a for a, b in itertools.pairwise(last)]
    answer(seconds[1:], "FedAvg of a float32 NumPy array; seen by the clients")


if __name__ == "__main__":
    if "--client" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--client", type=Path)
        client(parser.parse_args().client)
    else:
        main()
