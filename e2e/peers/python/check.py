"""Runs the unmodified nvidia-ml-py on a libnvidia-ml: listings of real cards, MIG's life cycle, the reads of monitors.

usage: check.py LISTINGS             all checks, on a simulated node
       check.py LISTINGS --read-only differences between real GPUs and the listings, changing nothing

The library is found by its soname, so LD_LIBRARY_PATH selects it. One line per check: "ok NAME" or "FAIL NAME: REASON".
"""

import json
import pathlib
import sys
from ctypes import byref, c_uint

import pynvml as nvml


def check(name, body):
    try:
        body()
    except Exception as error:  # a failed check must not stop the others
        print(f"FAIL python {name}: {type(error).__name__}: {error}")
    else:
        print(f"ok python {name}")


def want(what, got, expected):
    if got != expected:
        raise AssertionError(f"{what} is {got}, a real card has {expected}")


def refused(what, code, call, *arguments):
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        want(what, error.value, code)
    else:
        raise AssertionError(f"{what} was not refused")


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def devices():
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def profiles(device):
    """Profile information by index, up to the first invalid index."""
    found = {}
    for index in range(64):
        try:
            found[index] = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, index, version=2)
        except nvml.NVMLError_NotSupported:
            continue
        except nvml.NVMLError_InvalidArgument:
            return found
    raise AssertionError("the enumeration of profiles does not end")


def placements(device, profile_id):
    count = c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, byref(count))
    array = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, array, byref(count))
    return [(place.start, place.size) for place in array[: count.value]]


def described(device, info):
    """A profile in the form of a listing."""
    places = placements(device, info.id)
    return {
        "name": text(info.name).removeprefix("MIG "),
        "id": info.id,
        "instances": info.instanceCount,
        "memory_mib": info.memorySizeMB,
        "sm": info.multiprocessorCount,
        "ce": info.copyEngineCount,
        "dec": info.decoderCount,
        "enc": info.encoderCount,
        "jpg": info.jpegCount,
        "ofa": info.ofaCount,
        "size": places[0][1],
        "starts": [start for start, _ in places],
    }


def check_profiles(device, card):
    listed = {profile["index"]: {key: profile[key] for key in profile if key != "index"} for profile in card["profiles"]}
    found = {index: described(device, info) for index, info in profiles(device).items()}
    want("the list of profiles", found, listed)


def set_mode(device, mode):
    want("activation", nvml.nvmlDeviceSetMigMode(device, mode), nvml.NVML_SUCCESS)
    want("mode", nvml.nvmlDeviceGetMigMode(device), [mode, mode])


def instances(device, profile):
    array = (nvml.c_nvmlGpuInstance_t * profile["instances"])()
    count = c_uint(profile["instances"])
    nvml.nvmlDeviceGetGpuInstances(device, profile["id"], array, byref(count))
    return array[: count.value]


def whole_compute_instance(gi, slices):
    for index in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, index, 0)
        except nvml.NVMLError:
            continue
        if info.sliceCount == slices:
            return nvml.nvmlGpuInstanceCreateComputeInstance(gi, info.id)
    raise AssertionError(f"no compute instance profile of {slices} slices")


def life_cycle(device, card):
    """Creates, reads and destroys an instance of every profile, at the driver's own placement."""
    set_mode(device, nvml.NVML_DEVICE_MIG_ENABLE)
    for profile in card["profiles"]:
        gi = nvml.nvmlDeviceCreateGpuInstance(device, profile["id"])
        info = nvml.nvmlGpuInstanceGetInfo(gi)
        place = f"{info.placement.start}:{info.placement.size}"
        want(f"GPU instance at {place}", info.id, card["gi_ids"][place])
        want("instances listed", len(instances(device, profile)), 1)
        slices = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, profile["index"], version=2).sliceCount
        ci = whole_compute_instance(gi, slices)
        mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
        want("GPU instance of the MIG device", nvml.nvmlDeviceGetGpuInstanceId(mig), info.id)
        want("parent", nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)),
             nvml.nvmlDeviceGetUUID(device))
        want("name", text(nvml.nvmlDeviceGetName(mig)).endswith(" MIG " + profile["name"]), True)
        attributes = nvml.nvmlDeviceGetAttributes_v2(mig)
        want("SMs", attributes.multiprocessorCount, profile["sm"])
        memory = nvml.nvmlDeviceGetMemoryInfo(mig)
        want("memory", memory.total >> 20, profile["memory_mib"])
        refused("destroying it in use", nvml.NVML_ERROR_IN_USE, nvml.nvmlGpuInstanceDestroy, gi)
        nvml.nvmlComputeInstanceDestroy(ci)
        nvml.nvmlGpuInstanceDestroy(gi)
        refused("a stale handle", nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlGpuInstanceGetInfo, gi)
    set_mode(device, nvml.NVML_DEVICE_MIG_DISABLE)


def monitor(device):
    """The values of a GPU that monitoring programs read."""
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    want("total memory", memory.total, memory.used + memory.free + memory.reserved)
    pci = nvml.nvmlDeviceGetPciInfo(device)
    same = nvml.nvmlDeviceGetHandleByPciBusId(pci.busId)
    want("GPU at that address", nvml.nvmlDeviceGetUUID(same), nvml.nvmlDeviceGetUUID(device))
    want("processes", nvml.nvmlDeviceGetComputeRunningProcesses(device), [])
    nvml.nvmlDeviceGetGraphicsRunningProcesses(device)
    nvml.nvmlDeviceGetUtilizationRates(device)
    nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    nvml.nvmlDeviceGetPowerUsage(device)
    nvml.nvmlDeviceGetEnforcedPowerLimit(device)
    nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
    nvml.nvmlDeviceGetTotalEccErrors(device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    nvml.nvmlDeviceGetRemappedRows(device)
    nvml.nvmlDeviceGetPersistenceMode(device)
    nvml.nvmlDeviceGetComputeMode(device)
    values = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_REMAPPED_PENDING, 0xFFFF])
    want("results of fields", [value.nvmlReturn for value in values], [nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_SUPPORTED])


def read_only(cards):
    """Prints the differences between real GPUs and the listings. Changes nothing and cannot fail."""
    for device in devices():
        name = text(nvml.nvmlDeviceGetName(device))
        card = next((card for card in cards if card["product"] == name), None)
        if card is None:
            print(f"real {name}: no listing")
            continue
        listed = {profile["index"]: profile for profile in card["profiles"]}
        found = {index: {"index": index, **described(device, info)} for index, info in profiles(device).items()}
        for index in sorted(listed.keys() | found.keys()):
            if listed.get(index) != found.get(index):
                print(f"real {name}: profile index {index} is {found.get(index)}, listed as {listed.get(index)}")
        total = nvml.nvmlDeviceGetMemoryInfo(device).total >> 20
        if card.get("total_mib", total) != total:
            print(f"real {name}: total memory is {total} MiB, listed as {card['total_mib']}")
        print(f"real {name}: compared")


def main():
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    cards = [json.loads(file.read_text()) for file in files]
    nvml.nvmlInit()
    if "--read-only" in sys.argv[2:]:
        read_only(cards)
        return
    by_name = {text(nvml.nvmlDeviceGetName(device)): device for device in devices()}
    check("driver version", lambda: want("parts", len(text(nvml.nvmlSystemGetDriverVersion()).split(".")), 3))
    for card in cards:
        device = by_name.get(card["product"])
        if device is None:
            print(f"FAIL python {card['model']}: no {card['product']}")
            continue
        check(f"{card['model']} profiles with MIG off", lambda: check_profiles(device, card))
        check(f"{card['model']} life cycle", lambda: life_cycle(device, card))
        check(f"{card['model']} monitoring", lambda: monitor(device))
    check("shutdown", nvml.nvmlShutdown)
    check("after shutdown", lambda: refused("a call", nvml.NVML_ERROR_UNINITIALIZED, nvml.nvmlDeviceGetCount))


main()
