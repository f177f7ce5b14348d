"""NVIDIA's own CUDA runtime on the simulated driver: it must find every function that it asks for.

The runtime asks the driver for each of its functions when it is first used. The driver writes down what it was asked
for and what it answered; each answer must be the function that the headers name for that version and that kind of default
stream, and a program that asks again, in the same process, must get the same. With an interposer preloaded the same
checks hold it to what the driver answers: the function it gives must be of the same name.

usage: cudart.py LIBCUDART SYMBOLS CUDA-VERSION GPUS, with the simulated driver in LD_LIBRARY_PATH.
"""
import ctypes
import os
import sys
import tempfile

runtime_path, symbols_path, driver_version, gpus = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
OWN_STREAM = 2
label = os.path.basename(runtime_path)
failed = 0


def check(what, good, detail=""):
    global failed
    failed += not good
    print(f"{'ok' if good else 'FAIL'} {label}: {what}{'' if good else f' ({detail})'}", flush=True)


class DlInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("file", "base")] + [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


libc = ctypes.CDLL(None)
libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(DlInfo)]


def name_of(pointer):
    """The symbol that begins at an address."""
    info = DlInfo()
    if not pointer or not libc.dladdr(pointer, ctypes.byref(info)) or info.address != pointer:
        return None
    return info.name.decode() if info.name else None


class Symbols:
    """The committed list: what the headers say."""

    def __init__(self, path):
        rows = [line.split() for line in open(path) if not line.startswith("#")]
        self.rows = [(symbol, base, int(version), twin != "legacy") for symbol, base, version, twin in rows]

    def answer(self, name, version, flags):
        """The right function for a request, or None."""
        for twin in (True, False) if flags & OWN_STREAM else (False,):
            known = [row for row in self.rows if row[1] == name and row[3] == twin and row[2] <= version]
            if known:
                return max(known, key=lambda row: row[2])[0]
        return name if any(row[0] == name and row[2] <= version for row in self.rows) else None


log = os.path.join(tempfile.mkdtemp(), "asked")
os.environ["DIVVY_SIM_CUDA_ASKED"] = log
runtime = ctypes.CDLL(runtime_path)

count = ctypes.c_int(-1)
code = runtime.cudaGetDeviceCount(ctypes.byref(count))
check("the runtime starts and sees the GPUs", (code, count.value) == (0, gpus), f"code {code}, {count.value} GPUs")

free, total = ctypes.c_size_t(), ctypes.c_size_t()
code = runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
check("cudaMemGetInfo", code == 0 and 0 < free.value < total.value, f"code {code}")

pointer = ctypes.c_void_p()
code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(64 << 20))
after = ctypes.c_size_t()
runtime.cudaMemGetInfo(ctypes.byref(after), ctypes.byref(total))
check("cudaMalloc takes what it gives", code == 0 and free.value - after.value == 64 << 20, f"code {code}")
source, copy = (ctypes.c_char * 16)(*b"sixteen letters."), (ctypes.c_char * 16)()
codes = [
    runtime.cudaMemcpy(pointer, source, ctypes.c_size_t(16), 1),
    runtime.cudaMemcpy(copy, pointer, ctypes.c_size_t(16), 2),
]
check("cudaMemcpy there and back", codes == [0, 0] and copy.raw == source.raw, f"codes {codes}")
check("cudaFree", runtime.cudaFree(pointer) == 0)
pointer = ctypes.c_void_p()
code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 50))
check("cudaMalloc of too much is out of memory", code == 2, f"code {code}")
codes = [
    runtime.cudaMallocAsync(ctypes.byref(pointer), ctypes.c_size_t(1 << 20), None),
    runtime.cudaFreeAsync(pointer, None),
    runtime.cudaDeviceSynchronize(),
]
check("cudaMallocAsync, cudaFreeAsync, cudaDeviceSynchronize", codes == [0, 0, 0], f"codes {codes}")

# What it asked for: name, CUDA version, flags, the function that it got or "-".
asked = sorted({tuple(line.split()) for line in open(log)})
symbols = Symbols(symbols_path)
wrong, missing, different = [], [], []
driver = ctypes.CDLL("libcuda.so.1")
for name, version, flags, got in asked:
    version, flags = int(version), int(flags)
    right = symbols.answer(name, version, flags) if version <= driver_version else None
    if got != (right or "-"):
        wrong.append((name, version, flags, got, right))
    if right is None and version <= driver_version:
        missing.append(name)
    found, status = ctypes.c_void_p(), ctypes.c_int(-1)
    driver.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags), ctypes.byref(status)
    )
    if (name_of(found.value) or "-") != got:
        different.append((name, version, flags, got, name_of(found.value)))
check(f"the runtime asks for its {len(asked)} functions", len(asked) > 400, f"{len(asked)}")
check("each answer is the function of that version and stream", not wrong, str(wrong[:5]))
check("who asks again gets the same", not different, str(different[:5]))
unknown = [name for name in missing if not name.startswith("cuSubgrid")]
check("all of them are there, but for those that no header declares", not unknown, str(unknown[:5]))
sys.exit(failed > 0)
