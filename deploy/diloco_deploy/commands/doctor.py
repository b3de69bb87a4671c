"""`diloco doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.errors import ConfigError
from diloco_common.options import NO_SETTINGS, Flag, Json, SettingsOptions, number, setting, settings_from

_PARAMS = number(quantities.count, 1, 10**13, "a number of parameters, such as 125M or 70B")
_SECONDS = number(quantities.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")


def doctor(
    shards: Annotated[
        str | None, setting("worker.shards", "HOST:PORT,...", "look at the way from here to these shards")
    ] = None,
    *,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="look at the shards of the cluster that `diloco up` runs there")
    ] = None,
    shard: Annotated[Flag, Parameter(help="look at this machine: is it fit to run the shard of the settings?")] = False,
    run: Annotated[str | None, setting("run.id", "ID", "id of the run")] = None,
    tls: Annotated[str | None, setting("security.tls", "FOLDER", "certificate of the caller")] = None,
    token_file: Annotated[str | None, setting("security.token_file", "FILE", "bearer token of the caller")] = None,
    data_dir: Annotated[str | None, setting("shard.data_dir", "FOLDER", "data folder of the shard")] = None,
    params: Annotated[
        int | None, Parameter(converter=_PARAMS, metavar="125M", help="parameters of the model", show_default="ask")
    ] = None,
    step_time: Annotated[
        float, Parameter(converter=_SECONDS, metavar="1s", help="of one inner step", show_default="1s")
    ] = 1.0,
    learners: Annotated[
        int,
        Parameter(
            converter=number(quantities.count, 1, 1_000_000, "a whole number from 1"),
            metavar="L",
            help="learners that the shard will have",
        ),
    ] = 8,
    options: SettingsOptions = NO_SETTINGS,
    json: Json = False,
) -> int:
    """Say what is wrong, with a code for `diloco explain`, and what to do. On a learner's machine: the way to the
    shards, from the name to the bandwidth, and which settings the link allows. With --shard: disk, files, memory and
    kernels. It changes nothing, and ends within 20 s. Exit code 1 if something fails.
    """
    if folder is not None:
        if shards is not None:
            raise ConfigError("give --shards or --folder, one of them")
        from diloco_deploy.local_shards import shards_in

        found = shards_in(folder)
        shards, run, tls = ",".join(found.addresses), run or found.run, tls or (str(found.tls) if found.tls else None)
    flags = {
        "worker.shards": shards, "run.id": run, "security.tls": tls, "security.token_file": token_file,
        "shard.data_dir": data_dir,
    }  # fmt: skip
    settings = settings_from(options, flags)
    addresses = () if shard and shards is None else settings.worker.shards
    if not addresses and not shard:
        raise ConfigError(
            "what should be looked at? Name the shards (--shards ps-0:50051,ps-1:50051), or the --folder of "
            "`diloco up`, or say --shard: this machine"
        )
    from diloco_deploy.doctor.command import Patient
    from diloco_deploy.doctor.command import doctor as examined

    patient = Patient(settings, addresses, shard, params, step_time, learners)
    return examined(patient, as_json=json)
