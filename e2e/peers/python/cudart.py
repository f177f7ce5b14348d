"""Runs NVIDIA's CUDA runtime on the simulated driver: the runtime must find every function that it requests.

The runtime requests all its functions from the driver at its first use, and the driver logs each request and its answer.
An answer must be the function that the headers name for that version and kind of default stream. A repeated request in the
same process must get the same answer. With a preloaded interposer, the answer must be a function of the same name: the
interposer's own if the function is in its list of hooks, and the driver's otherwise. Distinct functions must stay distinct.

usage: cudart.py LIBCUDART SYMBOLS CUDA-VERSION [INTERPOSER HOOKS], with the simulated driver in LD_LIBRARY_PATH, and
the interposer in LD_PRELOAD if there is one.
"""
import ctypes
import os
import sys
import tempfile

runtime_path, symbols_path, driver_version = sys.argv[1], sys.argv[2], int(sys.argv[3])
interposer, hooks_path = sys.argv[4:6] if len(sys.argv) > 4 else (None, None)
OWN_STREAM = 2
label = os.path.basename(runtime_path) + (" with the library" if interposer else "")
failed = 0


def check(what, good, detail=""):
    global failed
    failed += not good
    print(f"{'ok' if good else 'FAIL'} {label}: {what}{'' if good else f' ({detail})'}", flush=True)


class DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


libc = ctypes.CDLL(None)
libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(DlInfo)]


def named(pointer):
    """The symbol at an address, and its library."""
    info = DlInfo()
    if not pointer or not libc.dladdr(pointer, ctypes.byref(info)) or info.address != pointer:
        return None, None
    return (info.name.decode() if info.name else None), os.path.basename(info.file.decode())


class Symbols:
    """The committed list of the functions in the headers."""

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


log = tempfile.NamedTemporaryFile()
os.environ["DIVVY_SIM_CUDA_LOOKUP_LOG"] = log.name
# Loaded first, so that a failing runtime does not unload it.
driver = ctypes.CDLL("libcuda.so.1")
runtime = ctypes.CDLL(runtime_path)

# The runtime requests all functions, then a proof that the driver is NVIDIA's, which fails here.
runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))

# The requests: name, CUDA version, flags, and the function in the answer or "-".
asked = sorted({tuple(line.rstrip("\n").rsplit(" ", 3)) for line in open(log.name)})
symbols = Symbols(symbols_path)
hooks = {line.strip() for line in open(hooks_path) if not line.startswith("#")} if interposer else set()
wrong, missing, different, elsewhere, places = [], [], [], [], {}
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
    symbol, library = named(found.value)
    if (symbol or "-") != got:
        different.append((name, version, flags, got, symbol))
    if symbol:
        # The interposer's function if it is hooked, otherwise the driver's.
        is_own = library == os.path.basename(interposer) if interposer else False
        if is_own != (symbol in hooks) or not (is_own or library.startswith("libcuda.so")):
            elsewhere.append((name, version, flags, symbol, library))
        # By the expected name, because the loader reports only one name of an address.
        places.setdefault(found.value, set()).add(got)
check(f"the runtime requests its {len(asked)} functions", len(asked) > 400, f"{len(asked)}")
check("each answer is the function of that version and stream", not wrong, str(wrong[:5]))
check("a repeated request gets the same answer", not different, str(different[:5]))
check("hooked functions are the interposer's, others the driver's", not elsewhere, str(elsewhere[:5]))
shared = [sorted(names) for names in places.values() if len(names) > 1]
check("distinct functions have distinct addresses", not shared, str(shared[:5]))
if interposer:
    own = sum(bool(names & hooks) for names in places.values())
    check("many of them are hooked", own > 50, f"{own}")
# A runtime also requests functions that no header declares, and one without a name.
unknown = [name for name in missing if name and not name.startswith("cuSubgrid")]
check("all functions of the headers exist", not unknown, str(unknown[:5]))
sys.exit(failed > 0)
