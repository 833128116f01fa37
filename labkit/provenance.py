"""Where and when a figure was measured: what a data file must say about itself."""

from datetime import UTC, datetime


def machine_facts(device=None) -> dict:
    """Date (UTC), device, driver, torch version and SM clock in MHz; None for what is not known.

    device: as in `devices.pick`.
    """
    import torch

    from labkit.ceilings import processor
    from labkit.devices import pick
    from labkit.monitor import identify

    gpu = identify(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": processor(pick(device)),
        "torch": torch.__version__,
        **_driver_facts(gpu),
    }


def _driver_facts(gpu) -> dict:
    from labkit import nvml

    facts = {"driver": None, "sm_clock_mhz": None}
    if gpu is None:
        return facts
    sampler = nvml.attempt(nvml.NvmlSampler, gpu)
    if sampler is None:
        return facts
    try:
        return {"driver": sampler.driver(), "sm_clock_mhz": sampler.read()["sm_clock_mhz"]}
    finally:
        sampler.close()
