"""Peer of peers.py: Flower, a FedAvg round of NumPy arrays over gRPC, run by start_server and start_client.

A round, as the server sees it: send parameters to all clients, `fit` without training, receive parameters, average.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import time
from typing import Any

import flwr
import numpy as np

from peer_processes import SYNC_S, Options, answer, free_port, read_options

MESSAGE_BYTES_MAX = 2**31 - 1
"""Flower puts no more into one message, so this peer fails above 536 M parameters."""


class TrainsNothing(flwr.client.NumPyClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


class TimedFedAvg(flwr.server.strategy.FedAvg):
    """FedAvg that measures the time from the beginning of a round to its mean."""

    def __init__(self, options: Options) -> None:
        self.seconds: list[float] = []
        values = [np.random.default_rng(0).standard_normal(size, dtype=np.float32) for size in options.sizes]
        super().__init__(
            fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=options.learners,
            min_available_clients=options.learners, accept_failures=False,
            initial_parameters=flwr.common.ndarrays_to_parameters(values),
        )  # fmt: skip

    def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
        instructions = super().configure_fit(*args, **kwargs)  # waits until all clients are there
        self._began = time.perf_counter()
        return instructions

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        assert not failures, failures
        merged = super().aggregate_fit(server_round, results, failures)
        self.seconds.append(time.perf_counter() - self._began)
        return merged


def client(address: str) -> None:
    logging.disable(logging.WARNING)
    _wait_until_served(address)
    flwr.client.start_client(
        server_address=address, client=TrainsNothing().to_client(), insecure=True, max_wait_time=SYNC_S,
        grpc_max_message_length=MESSAGE_BYTES_MAX,
    )  # fmt: skip


def _wait_until_served(address: str) -> None:
    """Wait for the server, because Flower's client gives up at once if nobody listens yet."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + SYNC_S
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=1.0).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"no server at {address}"
            time.sleep(0.05)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    options = read_options()
    address = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    clients = [context.Process(target=client, args=(address,), daemon=True) for _ in range(options.learners)]
    for process in clients:
        process.start()
    strategy = TimedFedAvg(options)
    flwr.server.start_server(
        server_address=address, strategy=strategy, grpc_max_message_length=MESSAGE_BYTES_MAX,
        config=flwr.server.ServerConfig(num_rounds=options.rounds + 1),
    )  # fmt: skip
    answer(strategy.seconds[1:], "FedAvg of float32 NumPy arrays; seen by the server")
