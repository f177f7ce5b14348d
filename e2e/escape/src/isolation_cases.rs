//! The isolation cases: each attack, the result that it must have, and its text in the table of the
//! documentation.

use divvy_api::sharing::Injection;

/// The result that an attack must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// The limit holds.
    Prevented,
    /// The agent reports a finding of this kind (possibly among others) within seconds and acts on it.
    Detected(&'static str),
    /// Only this bound limits the attack. The documentation names it.
    Bounded(&'static str),
    /// The GPU driver refuses the excess. The agent reports a finding of this kind (possibly among others)
    /// and kills no process.
    HeldByDriver(&'static str),
}

/// The device that the share is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Gpu,
    /// A GPU that reports for how long its multiprocessors were active.
    Hopper,
    MigInstance,
    /// A GPU whose driver enforces memory limits of cgroups.
    CgroupLimits,
}

/// The gain of a successful attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gain {
    /// More device memory than the share's limit.
    Memory,
    /// More device memory than the limit plus the overhead that the agent attributes to the GPU driver.
    Overhead,
    /// A balance of compute time that was never granted.
    Balance,
    /// More of the GPU's time than the share's ceiling.
    Time,
}

/// The compute policies of the share and of its neighbour, for attacks on compute time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeSetup {
    /// The share has a ceiling.
    Ceiling,
    /// No ceiling, beside a busy neighbour with three times the weight: a fourth of the GPU.
    Weight,
    /// No ceiling, beside a busy neighbour with a higher priority: next to nothing.
    LowPriority,
    /// The share has a ceiling, beside a busy neighbour with a ceiling twice as high.
    BusyNeighbour,
}

/// How an attack is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `escape ATTACK`.
    Escape,
    /// `escape ATTACK`, on a GPU driver whose functions have symbol versions. Not every driver has them.
    VersionedDriver,
    /// `escape plain` in two containers at once that have the same pages.
    TwoContainers,
    /// `escape plain` in a container with a volume of the pod's author.
    Volumes(Volume),
    /// The same without admission, as for a static pod.
    Unadmitted(Volume),
    /// A program with the driver linked into it.
    Static,
    /// A program that uses the GPU without a library of the driver.
    Raw,
}

/// The volume that the pod's author mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volume {
    /// An empty file over `/etc/ld.so.preload`.
    NoPreload,
    /// A page that allows everything, beside the share's.
    ForgedPage,
}

#[derive(Clone, Copy, Debug)]
pub struct IsolationCase {
    pub name: &'static str,
    pub attack: &'static str,
    pub expected: Expectation,
    pub method: Method,
    pub gain: Gain,
    pub setup: ComputeSetup,
    pub device: Device,
    /// The share may hold more than its part of the GPU, as managed memory.
    pub over_commits: bool,
    /// How the library comes into the container.
    pub injection: Injection,
    /// There is no other share of the same device.
    pub alone: bool,
    /// For `Expectation::Bounded`: the kind of finding that the agent must report. For
    /// `Expectation::Prevented`: the kind for which it may end the attack instead.
    pub reports: Option<&'static str>,
}

impl IsolationCase {
    const fn new(name: &'static str, attack: &'static str, expected: Expectation, device: Device) -> Self {
        Self {
            name,
            attack,
            expected,
            method: Method::Escape,
            gain: Gain::Memory,
            setup: ComputeSetup::Ceiling,
            device,
            over_commits: false,
            injection: Injection::Preload,
            alone: false,
            reports: None,
        }
    }

    const fn method(self, method: Method) -> Self {
        Self { method, ..self }
    }

    const fn device(self, device: Device) -> Self {
        Self { device, ..self }
    }

    const fn over_committing(self) -> Self {
        Self { over_commits: true, ..self }
    }

    const fn shim(self) -> Self {
        Self { injection: Injection::Shim, ..self }
    }

    const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    const fn reporting(self, kind: &'static str) -> Self {
        Self { reports: Some(kind), ..self }
    }

    /// The attack's name as an argument of `escape`: the case's name up to the `@`.
    pub fn attack_name(&self) -> &'static str {
        self.name.split_once('@').map_or(self.name, |(attack, _)| attack)
    }

    const fn time(self, setup: ComputeSetup) -> Self {
        Self { gain: Gain::Time, setup, ..self }
    }

    const fn gain(self, gain: Gain) -> Self {
        Self { gain, ..self }
    }
}

const fn prevented(name: &'static str, attack: &'static str) -> IsolationCase {
    IsolationCase::new(name, attack, Expectation::Prevented, Device::Gpu)
}

const fn detected(name: &'static str, attack: &'static str, kind: &'static str) -> IsolationCase {
    IsolationCase::new(name, attack, Expectation::Detected(kind), Device::Gpu)
}

const fn bounded(name: &'static str, attack: &'static str, bound: &'static str) -> IsolationCase {
    IsolationCase::new(name, attack, Expectation::Bounded(bound), Device::Gpu)
}

const fn held_by_driver(name: &'static str, attack: &'static str, kind: &'static str) -> IsolationCase {
    IsolationCase::new(name, attack, Expectation::HeldByDriver(kind), Device::CgroupLimits)
}

/// The process is not registered on the account page: it did not get the driver's functions from the library.
const UNREGISTERED: &str = "unregistered";
/// NVML reports more time than the share's ceiling, whatever the agent grants.
const OVER_COMPUTE_LIMIT: &str = "over-compute-limit";
/// The memory that the GPU driver reports is above the limit.
const OVER_MEMORY_LIMIT: &str = "over-memory-limit";
/// The process sees another policy page than the node's.
const PAGES_MASKED: &str = "pages-masked";
/// The account page contains values that no honest process writes.
const ACCOUNT: &str = "account";
/// The bound of a share without a ceiling that ignores its grants.
const TIME_SLICES: &str = "the GPU driver's time slices, half of the GPU beside one other busy process";

/// The bound of a share that ignores its grants beside busy neighbours on the same GPU or MIG instance.
/// The neighbours' kernels look up to twice as long then, and a neighbour gets down to half of its ceiling.
const TIME_SLICES_REPORTED: &str = "the GPU driver's time slices, which leave a busy neighbour at least half \
                                    of its ceiling; all shares of the device are reported as \
                                    `over-compute-limit`";

/// All cases, in the order of the table.
pub const ISOLATION_CASES: &[IsolationCase] = &[
    prevented("plain", "allocates more than the limit"),
    prevented("fork", "four children, each allocating a part"),
    prevented("fork-of-a-user", "fork after CUDA is in use"),
    prevented("exec", "fills the share, then calls `exec`"),
    prevented("absolute-path", "`dlopen` of the driver by its absolute path"),
    prevented("dlmopen", "`dlmopen`: loads the driver into a separate linker namespace"),
    prevented("deepbind", "`dlopen` with `RTLD_DEEPBIND`"),
    prevented("dlvsym", "`dlvsym`: looks up the driver's functions by symbol version")
        .method(Method::VersionedDriver),
    prevented("libc-dlsym", "libc's own `dlsym`, looked up by its symbol version"),
    prevented("cugetprocaddress", "`cuGetProcAddress`, also used to look up itself"),
    prevented("preload-unset", "`LD_PRELOAD` unset"),
    prevented("preload-replaced", "`LD_PRELOAD` replaced"),
    prevented("environment-cleared", "an empty environment"),
    prevented("policy-file", "writes, truncates, renames or unlinks the policy page's file"),
    prevented("policy-remount", "remounts the policy page, or mounts over it"),
    prevented("policy-mprotect", "`mprotect` of the mapped policy page"),
    prevented("policy-proc-mem", "writes the mapped policy page through `/proc/self/mem`"),
    prevented("policy-ptrace", "a child traces its parent and writes the policy page"),
    prevented("second-container", "a second container of the pod, at the same time")
        .method(Method::TwoContainers),
    prevented("volumes", "a volume of the pod mounted over `/etc/ld.so.preload`")
        .method(Method::Volumes(Volume::NoPreload)),
    prevented("volumes-forged", "a volume of the pod with a policy page that allows everything")
        .method(Method::Volumes(Volume::ForgedPage)),
    detected(
        "volumes-unadmitted",
        "without admission: a volume of the pod mounted over `/etc/ld.so.preload`",
        UNREGISTERED,
    )
    .method(Method::Unadmitted(Volume::NoPreload)),
    detected(
        "forged-unadmitted",
        "without admission: a volume of the pod with a policy page that allows everything",
        PAGES_MASKED,
    )
    .method(Method::Unadmitted(Volume::ForgedPage)),
    detected("static", "a static binary with its own driver library", UNREGISTERED).method(Method::Static),
    detected("own-libcuda", "a copy of the driver under another name and SONAME", UNREGISTERED),
    detected("raw", "raw ioctl, no driver library at all", UNREGISTERED).method(Method::Raw),
    detected("user-namespace", "a nested user namespace, whose root mounts over the pages", PAGES_MASKED),
    detected("pid-namespace", "processes outside the container's pid namespace", UNREGISTERED),
    detected("run-moved", "the container's root renames `/run/divvy`", PAGES_MASKED),
    detected("etc-moved", "the container's root renames `/etc`, and with it `ld.so.preload`", UNREGISTERED),
    detected(
        "pages-closed",
        "the container's root makes `/run/divvy` inaccessible and drops its capabilities",
        UNREGISTERED,
    ),
    detected("account-zeroed", "writes its own account page: nothing is used", OVER_MEMORY_LIMIT),
    detected("account-balance", "writes its own account page: the maximum balance of time", ACCOUNT)
        .gain(Gain::Balance),
    detected(
        "account-slot-stolen",
        "writes its own account page: a slot assigned to another process",
        OVER_MEMORY_LIMIT,
    ),
    detected(
        "account-generation",
        "writes its own account page: an incremented generation",
        OVER_MEMORY_LIMIT,
    ),
    detected(
        "deepbind-linked",
        "a library that is linked to the driver, opened with `RTLD_DEEPBIND`",
        UNREGISTERED,
    ),
    detected("dlmopen-linked", "a library that is linked to the driver, opened by `dlmopen`", UNREGISTERED),
    detected("link-map", "raw pointers, found by walking the loader's tables", UNREGISTERED),
    detected("library-patched", "patches the library's code in its own memory", OVER_MEMORY_LIMIT),
    detected("policy-mapped-over", "maps its own memory over the policy page", OVER_MEMORY_LIMIT),
    detected(
        "overhead-processes",
        "24 processes, each allocating the overhead of a context by raw pointers",
        OVER_MEMORY_LIMIT,
    )
    .gain(Gain::Overhead),
    prevented("time-queue", "compute time: queues as many kernels as possible on many streams")
        .gain(Gain::Time),
    prevented("time-processes", "compute time: launches from many processes").gain(Gain::Time),
    prevented("time-graphs", "compute time: hides its work in graphs").gain(Gain::Time),
    prevented("time-waits", "compute time: writes its own account page: its launches always wait")
        .gain(Gain::Time),
    prevented("time-charges", "compute time: writes its own account page: nothing was charged")
        .gain(Gain::Time),
    prevented("time-fresh-processes", "compute time: a new process for each kernel").gain(Gain::Time),
    prevented(
        "time-fresh-unawaited",
        "compute time: a new process for each kernel, which does not wait for the kernel",
    )
    .gain(Gain::Time),
    detected("time-endless", "compute time: one kernel that does not end", OVER_COMPUTE_LIMIT)
        .gain(Gain::Time),
    detected(
        "time-balance",
        "compute time: writes its own account page repeatedly: some time is left",
        OVER_COMPUTE_LIMIT,
    )
    .gain(Gain::Time),
    detected(
        "time-mismeasured",
        "compute time: patches the driver's code in its own memory, so that every kernel looks short",
        OVER_COMPUTE_LIMIT,
    )
    .gain(Gain::Time),
    detected(
        "time-policy-mapped-over",
        "compute time: maps its own memory over the policy page",
        OVER_COMPUTE_LIMIT,
    )
    .gain(Gain::Time),
    detected(
        "time-copies",
        "compute time: launches nothing, copies and migrates its managed memory",
        OVER_COMPUTE_LIMIT,
    )
    .gain(Gain::Time),
    bounded(
        "time-copies@weight",
        "no ceiling, beside a share of three times the weight: copies and migrates managed memory",
        TIME_SLICES,
    )
    .time(ComputeSetup::Weight),
    bounded(
        "time-policy-mapped-over@weight",
        "no ceiling, beside a share of three times the weight: maps its own memory over the policy page",
        TIME_SLICES,
    )
    .time(ComputeSetup::Weight),
    bounded(
        "time-policy-mapped-over@low",
        "low priority, beside a share of high priority: maps its own memory over the policy page",
        TIME_SLICES,
    )
    .time(ComputeSetup::LowPriority),
    prevented("plain@overcommit", "`overcommit`: allocates more than the limit").over_committing(),
    bounded(
        "account-managed@overcommit",
        "`overcommit`: writes its own account page: all of its memory is managed",
        "the class's total limit, all of which may then stay on the GPU",
    )
    .over_committing(),
    prevented("plain@mig", "MIG instance: allocates more than the limit").device(Device::MigInstance),
    detected(
        "own-libcuda@mig",
        "MIG instance: a copy of the driver under another name and SONAME",
        UNREGISTERED,
    )
    .device(Device::MigInstance),
    detected(
        "account-zeroed@mig",
        "MIG instance: writes its own account page: nothing is used",
        OVER_MEMORY_LIMIT,
    )
    .device(Device::MigInstance),
    prevented("plain@limits", "cgroup limits: allocates more than the limit").device(Device::CgroupLimits),
    held_by_driver(
        "static@limits",
        "cgroup limits: a static binary with its own driver library",
        UNREGISTERED,
    )
    .method(Method::Static),
    held_by_driver(
        "own-libcuda@limits",
        "cgroup limits: a copy of the driver under another name and SONAME",
        UNREGISTERED,
    ),
    held_by_driver("raw@limits", "cgroup limits: raw ioctl, no driver library at all", UNREGISTERED)
        .method(Method::Raw),
    held_by_driver(
        "etc-moved@limits",
        "cgroup limits: the container's root renames `/etc`, and with it `ld.so.preload`",
        UNREGISTERED,
    ),
    held_by_driver(
        "pid-namespace@limits",
        "cgroup limits: processes outside the container's pid namespace",
        UNREGISTERED,
    ),
    held_by_driver(
        "cgroup-left@limits",
        "cgroup limits: the container's root moves itself to another cgroup",
        UNREGISTERED,
    ),
    prevented(
        "account-managed@limits",
        "cgroup limits, `overcommit`: writes its own account page: all of its memory is managed",
    )
    .device(Device::CgroupLimits)
    .over_committing(),
    detected(
        "managed@limits",
        "cgroup limits: managed memory, by its own copy of the driver",
        OVER_MEMORY_LIMIT,
    )
    .device(Device::CgroupLimits),
    prevented("plain@shim", "`injection: shim`: allocates more than the limit").shim(),
    prevented("absolute-path@shim", "`injection: shim`: `dlopen` of the driver by its absolute path").shim(),
    prevented("linker-name@shim", "`injection: shim`: `dlopen` of `libcuda.so`, the driver's linker name")
        .shim(),
    prevented(
        "dlmopen@shim",
        "`injection: shim`: `dlmopen`: loads the driver into a separate linker namespace",
    )
    .shim(),
    prevented("deepbind@shim", "`injection: shim`: `dlopen` with `RTLD_DEEPBIND`").shim(),
    prevented(
        "deepbind-linked@shim",
        "`injection: shim`: a library that is linked to the driver, opened with `RTLD_DEEPBIND`",
    )
    .shim(),
    prevented(
        "dlmopen-linked@shim",
        "`injection: shim`: a library that is linked to the driver, opened by `dlmopen`",
    )
    .shim(),
    prevented(
        "dlvsym@shim",
        "`injection: shim`: `dlvsym`: looks up the driver's functions by symbol version",
    )
    .method(Method::VersionedDriver)
    .shim(),
    prevented("cugetprocaddress@shim", "`injection: shim`: `cuGetProcAddress`, also used to look up itself")
        .shim(),
    prevented("preload-unset@shim", "`injection: shim`: `LD_PRELOAD` unset").shim(),
    prevented("environment-cleared@shim", "`injection: shim`: an empty environment").shim(),
    detected(
        "real-path@shim",
        "`injection: shim`: `dlopen` of the real driver by its absolute path",
        UNREGISTERED,
    )
    .shim(),
    detected(
        "real-path-beside@shim",
        "`injection: shim`: the real driver beside the shim",
        OVER_MEMORY_LIMIT,
    )
    .shim(),
    detected(
        "real-directory@shim",
        "`injection: shim`: `LD_LIBRARY_PATH` names the real driver's directory",
        UNREGISTERED,
    )
    .shim(),
    detected("static@shim", "`injection: shim`: a static binary with its own driver library", UNREGISTERED)
        .method(Method::Static)
        .shim(),
    detected(
        "own-libcuda@shim",
        "`injection: shim`: a copy of the driver under another name and SONAME",
        UNREGISTERED,
    )
    .shim(),
    detected(
        "link-map@shim",
        "`injection: shim`: raw pointers, found by walking the loader's tables",
        UNREGISTERED,
    )
    .shim(),
    detected(
        "time-mismeasured@mig",
        "compute time, alone on a MIG instance: patches the driver's code, so that every kernel looks short",
        OVER_COMPUTE_LIMIT,
    )
    .device(Device::MigInstance)
    .gain(Gain::Time)
    .alone(),
    detected(
        "time-policy-mapped-over@mig",
        "compute time, alone on a MIG instance: maps its own memory over the policy page",
        OVER_COMPUTE_LIMIT,
    )
    .device(Device::MigInstance)
    .gain(Gain::Time)
    .alone(),
    prevented(
        "time-waits@mig",
        "compute time, alone on a MIG instance: writes its own account page: its launches always wait",
    )
    .device(Device::MigInstance)
    .gain(Gain::Time)
    .alone(),
    bounded(
        "time-mismeasured@shared",
        "compute time, beside a busy share: patches the driver's code, so that every kernel looks short",
        TIME_SLICES_REPORTED,
    )
    .device(Device::Hopper)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    bounded(
        "time-policy-mapped-over@shared",
        "compute time, beside a busy share: maps its own memory over the policy page",
        TIME_SLICES_REPORTED,
    )
    .device(Device::Hopper)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    prevented(
        "time-grant-forged@shared",
        "compute time, beside a busy share: maps a policy page with an endless quantum over its own",
    )
    .device(Device::Hopper)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    bounded(
        "time-raw-launches@shared",
        "compute time, beside a busy share: launches by raw pointers, found by walking the loader's tables",
        TIME_SLICES_REPORTED,
    )
    .device(Device::Hopper)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    prevented(
        "time-waits@shared",
        "compute time, beside a busy share: writes its own account page: its launches always wait",
    )
    .device(Device::Hopper)
    .time(ComputeSetup::BusyNeighbour),
    bounded(
        "time-mismeasured@mig-shared",
        "compute time, beside a busy share on a MIG instance: patches the driver's code, so that every \
         kernel looks short",
        TIME_SLICES_REPORTED,
    )
    .device(Device::MigInstance)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    bounded(
        "time-policy-mapped-over@mig-shared",
        "compute time, beside a busy share on a MIG instance: maps its own memory over the policy page",
        TIME_SLICES_REPORTED,
    )
    .device(Device::MigInstance)
    .time(ComputeSetup::BusyNeighbour)
    .reporting(OVER_COMPUTE_LIMIT),
    prevented(
        "time-waits@mig-shared",
        "compute time, beside a busy share on a MIG instance: writes its own account page: its launches \
         always wait",
    )
    .device(Device::MigInstance)
    .time(ComputeSetup::BusyNeighbour),
];

/// The case of that name.
pub fn named(name: &str) -> Option<&'static IsolationCase> {
    ISOLATION_CASES.iter().find(|case| case.name == name)
}
