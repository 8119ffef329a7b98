"""How many layers fit on the devices: what ``-ngl auto`` means for a plan."""

from __future__ import annotations

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.predict import estimate
from localkv.units import GIB, plural

#: What llama.cpp leaves free on each device (fit_params_target in common/common.h), in bytes.
MARGIN = GIB


def most_layers(shape: ModelShape, config: RunConfig, *, margin: int = MARGIN) -> int:
    """Return the largest n_gpu_layers under which every device keeps ``margin`` bytes free.

    The output counts as one layer more, as it does for llama.cpp; 0 where not even one fits.
    ``config.device_free`` are the bytes free on each device.

    Raises:
        UsageError: the free memory of a device is not known, or the engine refuses ``config``.
    """
    free = config.device_free or ()
    if len(free) < config.n_devices:
        raise UsageError(
            f"the free memory of {len(free)} of {plural(config.n_devices, 'GPU')} is known",
            "give it with --device-free, or a number of layers",
        )
    for layers in range(shape.n_layer + 1, 0, -1):
        held = estimate(shape, config.with_(n_gpu_layers=layers)).devices[1:]
        if all(device.total + margin <= free[int(device.name[3:])] for device in held):
            return layers
    return 0
