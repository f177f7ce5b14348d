//! The tricks, what each must come to, and in whose words the table of the documentation tells it.

use divvy_api::sharing::Injection;

/// What must become of a trick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Must {
    /// The limit holds.
    BePrevented,
    /// The node finds it within seconds, as this sort of finding among others, and acts upon it.
    BeDetected(&'static str),
    /// Nothing holds it but that bound, which the documentation tells.
    BeNamed(&'static str),
    /// The GPU driver refuses it. The node tells of this sort of finding among others, and ends nobody.
    BeHeld(&'static str),
}

/// What the share is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Gpu,
    /// One that tells for how long its multiprocessors were active.
    Hopper,
    /// A MIG instance.
    Instance,
    /// A GPU whose driver keeps limits of cgroups.
    Limiting,
}

/// What is won by a trick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gain {
    /// More device memory than the share's.
    Memory,
    /// More than that, and more than passes for the GPU driver's own.
    Overhead,
    /// A balance of compute time that nobody granted.
    Balance,
    /// More of the GPU's time than the share's ceiling.
    Time,
}

/// What the share may have of the GPU's time, where that is what is won.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// A ceiling.
    Ceiling,
    /// All that others leave: a fourth, beside one at work that has three times its weight.
    Weight,
    /// The same: next to nothing, beside one at work that has precedence.
    Low,
    /// A ceiling, beside one at work that has a part twice as large.
    Beside,
}

/// How a trick is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// By `escape` with the row's word.
    Escape,
    /// By `escape` with the row's word, on a driver whose functions have versions, as not every one's have.
    Versioned,
    /// By `escape plain` in two containers at once that have the same pages.
    TwoContainers,
    /// By `escape plain` in a container with volumes that its pod's author has mounted.
    Volumes(Volume),
    /// The same, past admission: as a pod from a file on the node comes.
    Unadmitted(Volume),
    /// By a program that has the driver linked into it.
    Static,
    /// By a program that speaks to the GPU without a library of the driver's.
    Raw,
}

/// What a pod's author mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volume {
    /// Nothing, over what the loader preloads.
    NoPreload,
    /// A page that allows everything, beside the share's.
    ForgedPage,
}

#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub trick: &'static str,
    pub must: Must,
    pub play: Play,
    pub gain: Gain,
    pub terms: Terms,
    pub on: On,
    /// The share may hold more than it has of the GPU, as managed memory.
    pub over_commits: bool,
    /// How the library comes into the container.
    pub injection: Injection,
    /// No other share is of the same device.
    pub alone: bool,
    /// What the node has to tell of what is named with its bound.
    pub tells: Option<&'static str>,
}

impl Row {
    const fn of(name: &'static str, trick: &'static str, must: Must, on: On) -> Self {
        Self {
            name,
            trick,
            must,
            play: Play::Escape,
            gain: Gain::Memory,
            terms: Terms::Ceiling,
            on,
            over_commits: false,
            injection: Injection::Preload,
            alone: false,
            tells: None,
        }
    }

    const fn played(self, play: Play) -> Self {
        Self { play, ..self }
    }

    const fn on(self, on: On) -> Self {
        Self { on, ..self }
    }

    const fn over_committing(self) -> Self {
        Self { over_commits: true, ..self }
    }

    const fn shimmed(self) -> Self {
        Self { injection: Injection::Shim, ..self }
    }

    const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    const fn told(self, kind: &'static str) -> Self {
        Self { tells: Some(kind), ..self }
    }

    /// What `escape` calls it: the name up to where the device begins.
    pub fn word(&self) -> &'static str {
        self.name.split_once('@').map_or(self.name, |(word, _)| word)
    }

    const fn by(self, terms: Terms) -> Self {
        Self { gain: Gain::Time, terms, ..self }
    }

    const fn winning(self, gain: Gain) -> Self {
        Self { gain, ..self }
    }
}

const fn prevented(name: &'static str, trick: &'static str) -> Row {
    Row::of(name, trick, Must::BePrevented, On::Gpu)
}

const fn detected(name: &'static str, trick: &'static str, as_what: &'static str) -> Row {
    Row::of(name, trick, Must::BeDetected(as_what), On::Gpu)
}

const fn named_with(name: &'static str, trick: &'static str, bound: &'static str) -> Row {
    Row::of(name, trick, Must::BeNamed(bound), On::Gpu)
}

const fn held(name: &'static str, trick: &'static str, told_as: &'static str) -> Row {
    Row::of(name, trick, Must::BeHeld(told_as), On::Limiting)
}

/// Not registered on the account page, whatever loaded the driver's functions instead of the library.
const HIDDEN: &str = "hidden";
/// By NVML's word it has more time than its ceiling, whatever it is granted.
const OVER_TIME: &str = "over-time";
/// The sum by the GPU driver's word is above the limit.
const OVER: &str = "over-limit";
/// The policy page that the process sees is not the node's.
const PAGES: &str = "pages";
/// The account page says what no honest process writes.
const ACCOUNT: &str = "account";
/// What holds a share without a ceiling that does not heed what it is granted.
const TURNS: &str = "the GPU driver's time slices: of two processes at work each has half";

/// What holds a share that has neighbours at work on its GPU or instance: kernels of these look longer beside it, and they have less than half.
const TOLD_TURNS: &str = "the GPU driver's time slices: two thirds beside another process at work; all its shares are told of as `over-time`";

/// All of them, in the order of the table.
pub const ROWS: &[Row] = &[
    prevented("plain", "just allocates more"),
    prevented("fork", "four children, each with a part"),
    prevented("fork-of-a-user", "fork after CUDA is in use"),
    prevented("exec", "fills the share, then becomes another image"),
    prevented("absolute-path", "`dlopen` of the driver by its absolute path"),
    prevented("dlmopen", "`dlmopen`: the driver in a linker namespace of its own"),
    prevented("deepbind", "`dlopen` with `RTLD_DEEPBIND`"),
    prevented("dlvsym", "`dlvsym`: the driver's functions by a version").played(Play::Versioned),
    prevented("libc-dlsym", "libc's own `dlsym`, found by its version"),
    prevented("cugetprocaddress", "`cuGetProcAddress`, asked for itself too"),
    prevented("preload-unset", "`LD_PRELOAD` unset"),
    prevented("preload-replaced", "`LD_PRELOAD` replaced"),
    prevented("environment-cleared", "an empty environment"),
    prevented("policy-file", "writes, truncates, renames or unlinks the policy page's file"),
    prevented("policy-remount", "remounts the policy page, or mounts over it"),
    prevented("policy-mprotect", "`mprotect` of the mapped policy page"),
    prevented("policy-proc-mem", "writes the mapped policy page through `/proc/self/mem`"),
    prevented("policy-ptrace", "a child that traces its parent and writes the policy page"),
    prevented("second-container", "a second container of the pod, at the same time")
        .played(Play::TwoContainers),
    prevented("volumes", "the pod's own volume mounted over what the loader preloads")
        .played(Play::Volumes(Volume::NoPreload)),
    prevented("volumes-forged", "the pod's own volume with a policy page that allows everything")
        .played(Play::Volumes(Volume::ForgedPage)),
    detected("volumes-unadmitted", "the same volume over the preload, where no admission was asked", HIDDEN)
        .played(Play::Unadmitted(Volume::NoPreload)),
    detected("forged-unadmitted", "the same forged page, where no admission was asked", PAGES)
        .played(Play::Unadmitted(Volume::ForgedPage)),
    detected("static", "a static binary with its own driver library", HIDDEN).played(Play::Static),
    detected("own-libcuda", "a copy of the driver under another name and SONAME", HIDDEN),
    detected("raw", "raw ioctl, no driver library at all", HIDDEN).played(Play::Raw),
    detected("user-namespace", "a nested user namespace, whose root mounts over the pages", PAGES),
    detected("pid-namespace", "processes outside the container's pid namespace", HIDDEN),
    detected("run-moved", "the container's root moves `/run/divvy` away", PAGES),
    detected(
        "etc-moved",
        "the container's root moves `/etc` away, and with it what the loader preloads",
        HIDDEN,
    ),
    detected(
        "pages-closed",
        "the container's root closes `/run/divvy`, and gives up the right to pass",
        HIDDEN,
    ),
    detected("account-zeroed", "writes its own account page: nothing used", OVER),
    detected("account-balance", "writes its own account page: all the time there is", ACCOUNT)
        .winning(Gain::Balance),
    detected("account-slot-stolen", "writes its own account page: a slot given to another process", OVER),
    detected("account-generation", "writes its own account page: a generation bumped", OVER),
    detected(
        "deepbind-linked",
        "a library that is linked to the driver, opened with `RTLD_DEEPBIND`",
        HIDDEN,
    ),
    detected("dlmopen-linked", "a library that is linked to the driver, opened by `dlmopen`", HIDDEN),
    detected("link-map", "raw pointers, found by walking the loader's tables", HIDDEN),
    detected("library-patched", "patches the library's code in its own memory", OVER),
    detected("policy-mapped-over", "maps memory of its own over the policy page", OVER),
    detected(
        "overhead-processes",
        "two dozen processes, each with as much by raw pointers as a context may take",
        OVER,
    )
    .winning(Gain::Overhead),
    prevented("time-queue", "compute time: queues all that it can, on many streams").winning(Gain::Time),
    prevented("time-processes", "compute time: launches from many processes").winning(Gain::Time),
    prevented("time-graphs", "compute time: hides its work in graphs").winning(Gain::Time),
    prevented("time-waits", "compute time: writes its own account page: its launches wait all the time")
        .winning(Gain::Time),
    prevented("time-charges", "compute time: writes its own account page: nothing was charged")
        .winning(Gain::Time),
    prevented("time-fresh-processes", "compute time: a new process for each kernel").winning(Gain::Time),
    prevented("time-fresh-unawaited", "compute time: the same, and none waits for its kernel")
        .winning(Gain::Time),
    detected("time-endless", "compute time: one kernel that does not end", OVER_TIME).winning(Gain::Time),
    detected(
        "time-balance",
        "compute time: writes its own account page again and again: some time is left",
        OVER_TIME,
    )
    .winning(Gain::Time),
    detected(
        "time-mismeasured",
        "compute time: patches the driver's code in its own memory, so that every kernel looks short",
        OVER_TIME,
    )
    .winning(Gain::Time),
    detected(
        "time-policy-mapped-over",
        "compute time: maps memory of its own over the policy page",
        OVER_TIME,
    )
    .winning(Gain::Time),
    detected(
        "time-copies",
        "compute time: launches nothing, copies and moves its managed memory to and fro",
        OVER_TIME,
    )
    .winning(Gain::Time),
    named_with("time-copies@weight", "the same, a share without a ceiling beside one of three times its weight", TURNS)
        .by(Terms::Weight),
    named_with(
        "time-policy-mapped-over@weight",
        "such a share maps memory of its own over the policy page",
        TURNS,
    )
    .by(Terms::Weight),
    named_with("time-policy-mapped-over@low", "the same, a share of low priority beside one of high", TURNS)
        .by(Terms::Low),
    prevented("plain@overcommit", "a share that over-commits: just allocates more").over_committing(),
    named_with(
        "account-managed@overcommit",
        "the same: writes its own account page: all that it holds is managed memory",
        "what its class lets it hold in all, none of which moves then",
    )
    .over_committing(),
    prevented("plain@mig", "a share of a MIG instance: just allocates more").on(On::Instance),
    detected("own-libcuda@mig", "the same: a copy of the driver under another name and SONAME", HIDDEN)
        .on(On::Instance),
    detected("account-zeroed@mig", "the same: writes its own account page: nothing used", OVER)
        .on(On::Instance),
    prevented("plain@limits", "a GPU driver that limits cgroups: just allocates more").on(On::Limiting),
    held("static@limits", "the same: a static binary with its own driver library", HIDDEN)
        .played(Play::Static),
    held("own-libcuda@limits", "the same: a copy of the driver under another name and SONAME", HIDDEN),
    held("raw@limits", "the same: raw ioctl, no driver library at all", HIDDEN).played(Play::Raw),
    held(
        "etc-moved@limits",
        "the same: the container's root moves `/etc` away, and with it what the loader preloads",
        HIDDEN,
    ),
    held("pid-namespace@limits", "the same: processes outside the container's pid namespace", HIDDEN),
    held("cgroup-left@limits", "the same: the container's root moves itself to another cgroup", HIDDEN),
    prevented(
        "account-managed@limits",
        "the same: a share that over-commits writes its own account page: all that it holds is managed memory",
    )
    .on(On::Limiting)
    .over_committing(),
    detected("managed@limits", "the same: managed memory, by a driver library of its own", OVER)
        .on(On::Limiting),
    prevented("plain@shim", "libraries in the place of the driver's (`injection: shim`): just allocates more")
        .shimmed(),
    prevented("absolute-path@shim", "the same: `dlopen` of the driver by its absolute path").shimmed(),
    prevented("linker-name@shim", "the same: `dlopen` of `libcuda.so`, the driver's name for linkers").shimmed(),
    prevented("dlmopen@shim", "the same: `dlmopen`: the driver in a linker namespace of its own").shimmed(),
    prevented("deepbind@shim", "the same: `dlopen` with `RTLD_DEEPBIND`").shimmed(),
    prevented(
        "deepbind-linked@shim",
        "the same: a library that is linked to the driver, opened with `RTLD_DEEPBIND`",
    )
    .shimmed(),
    prevented("dlmopen-linked@shim", "the same: a library that is linked to the driver, opened by `dlmopen`")
        .shimmed(),
    prevented("dlvsym@shim", "the same: `dlvsym`: the driver's functions by a version")
        .played(Play::Versioned)
        .shimmed(),
    prevented("cugetprocaddress@shim", "the same: `cuGetProcAddress`, asked for itself too").shimmed(),
    prevented("preload-unset@shim", "the same: `LD_PRELOAD` unset").shimmed(),
    prevented("environment-cleared@shim", "the same: an empty environment").shimmed(),
    detected("real-path@shim", "the same: `dlopen` of the real driver by its absolute path", HIDDEN)
        .shimmed(),
    detected("real-path-beside@shim", "the same: the real driver beside the one in its place", OVER).shimmed(),
    detected("real-directory@shim", "the same: `LD_LIBRARY_PATH` leads to the real driver", HIDDEN).shimmed(),
    detected("static@shim", "the same: a static binary with its own driver library", HIDDEN)
        .played(Play::Static)
        .shimmed(),
    detected("own-libcuda@shim", "the same: a copy of the driver under another name and SONAME", HIDDEN)
        .shimmed(),
    detected("link-map@shim", "the same: raw pointers, found by walking the loader's tables", HIDDEN)
        .shimmed(),
    detected(
        "time-mismeasured@mig",
        "compute time of a MIG instance that a share has alone: patches the driver's code, so that every kernel looks short",
        OVER_TIME,
    )
    .on(On::Instance)
    .winning(Gain::Time)
    .alone(),
    detected(
        "time-policy-mapped-over@mig",
        "the same: maps memory of its own over the policy page",
        OVER_TIME,
    )
    .on(On::Instance)
    .winning(Gain::Time)
    .alone(),
    prevented(
        "time-waits@mig",
        "the same: writes its own account page: its launches wait all the time",
    )
    .on(On::Instance)
    .winning(Gain::Time)
    .alone(),
    named_with(
        "time-mismeasured@shared",
        "compute time of a GPU on which another share is at work: patches the driver's code, so that every kernel looks short",
        TOLD_TURNS,
    )
    .on(On::Hopper)
    .by(Terms::Beside)
    .told(OVER_TIME),
    named_with(
        "time-policy-mapped-over@shared",
        "the same: maps memory of its own over the policy page",
        TOLD_TURNS,
    )
    .on(On::Hopper)
    .by(Terms::Beside)
    .told(OVER_TIME),
    prevented(
        "time-waits@shared",
        "the same: writes its own account page: its launches wait all the time",
    )
    .on(On::Hopper)
    .by(Terms::Beside),
    named_with(
        "time-mismeasured@mig-shared",
        "compute time of a MIG instance of which another share has a part: patches the driver's code, so that every kernel looks short",
        TOLD_TURNS,
    )
    .on(On::Instance)
    .by(Terms::Beside)
    .told(OVER_TIME),
    named_with(
        "time-policy-mapped-over@mig-shared",
        "the same: maps memory of its own over the policy page",
        TOLD_TURNS,
    )
    .on(On::Instance)
    .by(Terms::Beside)
    .told(OVER_TIME),
    prevented(
        "time-waits@mig-shared",
        "the same: writes its own account page: its launches wait all the time",
    )
    .on(On::Instance)
    .by(Terms::Beside),
];

/// The row of that name.
pub fn named(name: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.name == name)
}
