//! The fields of the documents, as data for the parser and for the reference documentation.

use crate::names::CONFIG_API_VERSION;
use crate::schema::{Field, Object, Shape};
use crate::sharing::{Injection, Interval, Priority};

pub(super) const TIME_SLICING: &str = "TimeSlicing";
pub(super) const MPS: &str = "MPS";

/// All documents, for the parser and the reference documentation.
pub const KINDS: &[&Object] = &[&GPU_CONFIG, &MIG_DEVICE_CONFIG, &SHARE_CONFIG];

const API_VERSION: Field = Field {
    name: "apiVersion",
    shape: Shape::Literally(CONFIG_API_VERSION),
    required: true,
    absent: "",
    about: "The version of this document.",
};

const fn kind(name: &'static str) -> Field {
    Field { name: "kind", shape: Shape::Literally(name), required: true, absent: "", about: "" }
}

pub(super) static GPU_CONFIG: Object = Object {
    name: "GpuConfig",
    about: "For whole GPUs (DeviceClass `gpu.divvy.dev`): how the pods and containers of one claim share \
         its GPU.",
    fields: &[
        API_VERSION,
        kind("GpuConfig"),
        Field {
            name: "sharing",
            shape: Shape::Object(&GPU_SHARING),
            required: false,
            absent: "no sharing is configured: processes are time-sliced with the GPU driver's default",
            about: "How the GPU is shared.",
        },
    ],
};

pub(super) static MIG_DEVICE_CONFIG: Object = Object {
    name: "MigDeviceConfig",
    about: "For MIG instances (DeviceClass `mig.divvy.dev` and those of single profiles).",
    fields: &[
        API_VERSION,
        kind("MigDeviceConfig"),
        Field {
            name: "sharing",
            shape: Shape::Object(&MIG_SHARING),
            required: false,
            absent: "no sharing is configured",
            about: "How the instance is shared.",
        },
    ],
};

pub(super) static SHARE_CONFIG: Object = Object {
    name: "ShareConfig",
    about: "For shares of a GPU or MIG instance: how limits are enforced. It belongs in a DeviceClass. A \
         claim may only set `ceiling`, up to that of its class. A change of the class also applies to \
         existing shares, except for `injection`.",
    fields: &[
        API_VERSION,
        kind("ShareConfig"),
        Field {
            name: "injection",
            shape: Shape::OneOf(Injection::NAMES),
            required: false,
            absent: "preload",
            about: "How the library that enforces the limits is loaded in containers: `preload` uses \
                 `/etc/ld.so.preload`; `shim` replaces the GPU driver's libraries, for programs that do not \
                 work with a preloaded library.",
        },
        Field {
            name: "observeOnly",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "Count usage, but enforce nothing. The share may then use up the memory of the GPU.",
        },
        Field {
            name: "priority",
            shape: Shape::OneOf(Priority::NAMES),
            required: false,
            absent: "Low",
            about: "While a share with priority High works, shares with priority Low on the same GPU wait \
                 (whole GPUs only).",
        },
        Field {
            name: "weight",
            shape: Shape::Count(1, 10_000),
            required: false,
            absent: "100",
            about: "Compute time that is not guaranteed, or unused, is divided by weight (whole GPUs only).",
        },
        Field {
            name: "ceiling",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "the value of `cores` if it is set, else 100",
            about: "Maximum percent of the device's compute time, even if the device is idle. If a class \
                 sets it, shares with `cores` may use idle time up to it (whole GPUs only).",
        },
        Field {
            name: "overcommit",
            shape: Shape::Count(100, 1000),
            required: false,
            absent: "100",
            about: "Percent of the claimed memory that the share may hold. Memory beyond 100 percent is \
                 managed memory, which the GPU driver migrates to host memory and back. The scheduler \
                 counts the claimed memory, so the used memory of all shares may exceed that of the GPU.",
        },
        Field {
            name: "encoders",
            shape: Shape::Count(0, 1000),
            required: false,
            absent: "the limit of the GPU driver",
            about: "Maximum number of open encoder sessions of the share. The load of a session is not \
                 limited. Only with `injection: preload`.",
        },
        Field {
            name: "decoders",
            shape: Shape::Count(0, 1000),
            required: false,
            absent: "the limit of the GPU driver",
            about: "The same for the video decoder.",
        },
        Field {
            name: "messages",
            shape: Shape::Flag,
            required: false,
            absent: "true",
            about: "Each program prints one line on its standard error when a limit of the share first \
                 refuses an allocation, and one when it first delays a launch. Only if that is a pipe or a \
                 terminal.",
        },
        Field {
            name: "schedule",
            shape: Shape::List(&Shape::Object(&SCHEDULE_ENTRY)),
            required: false,
            absent: "the same values all day",
            about: "Times of day with other values. If several entries apply, the last one wins.",
        },
    ],
};

static SCHEDULE_ENTRY: Object = Object {
    name: "ScheduleEntry",
    about: "A time range of each day, in UTC, with values that override those of the ShareConfig.",
    fields: &[
        Field { name: "from", shape: Shape::Clock, required: true, absent: "", about: "The first minute." },
        Field {
            name: "to",
            shape: Shape::Clock,
            required: true,
            absent: "",
            about: "The end; on the next day if it is earlier than `from`.",
        },
        Field {
            name: "priority",
            shape: Shape::OneOf(Priority::NAMES),
            required: false,
            absent: "unchanged",
            about: "As above.",
        },
        Field {
            name: "weight",
            shape: Shape::Count(1, 10_000),
            required: false,
            absent: "unchanged",
            about: "As above.",
        },
        Field {
            name: "ceiling",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "unchanged",
            about: "As above.",
        },
    ],
};

static GPU_SHARING: Object = Object {
    name: "GpuSharing",
    about: "",
    fields: &[
        Field {
            name: "strategy",
            shape: Shape::OneOf(&[TIME_SLICING, MPS]),
            required: true,
            absent: "",
            about: "Time-slicing of processes, or concurrent execution as clients of an MPS control daemon.",
        },
        Field {
            name: "timeSlicingConfig",
            shape: Shape::Object(&TIME_SLICING_CONFIG),
            required: false,
            absent: "interval Default",
            about: "Only with strategy TimeSlicing.",
        },
        MPS_CONFIG_FIELD,
    ],
};

static MIG_SHARING: Object = Object {
    name: "MigDeviceSharing",
    about: "",
    fields: &[
        Field {
            name: "strategy",
            shape: Shape::OneOf(&[MPS]),
            required: true,
            absent: "",
            about: "Processes run concurrently as clients of an MPS control daemon. TimeSlicing is \
                 rejected: its interval has no effect on a MIG instance.",
        },
        MPS_CONFIG_FIELD,
    ],
};

const MPS_CONFIG_FIELD: Field = Field {
    name: "mpsConfig",
    shape: Shape::Object(&MPS_CONFIG),
    required: false,
    absent: "no limits",
    about: "Only with strategy MPS.",
};

static TIME_SLICING_CONFIG: Object = Object {
    name: "TimeSlicingConfig",
    about: "",
    fields: &[Field {
        name: "interval",
        shape: Shape::OneOf(Interval::NAMES),
        required: false,
        absent: "Default",
        about: "The time slice of a process.",
    }],
};

static MPS_CONFIG: Object = Object {
    name: "MpsConfig",
    about: "Limits apply to each client process. They are cooperative: a client can raise its own limits.",
    fields: &[
        Field {
            name: "defaultActiveThreadPercentage",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "all multiprocessors",
            about: "Percent of the multiprocessors that a client may use.",
        },
        Field {
            name: "defaultPinnedDeviceMemoryLimit",
            shape: Shape::Memory,
            required: false,
            absent: "all memory",
            about: "Device memory that a client may allocate, rounded down to whole Mi.",
        },
        Field {
            name: "defaultPerDevicePinnedMemoryLimit",
            shape: Shape::Map(&Shape::Memory),
            required: false,
            absent: "the limit above on each device",
            about: "The same for one device. The key is 0 or, for a whole GPU, its UUID. A limit for a GPU \
                 that the claim did not get has no effect.",
        },
        Field {
            name: "multiUser",
            shape: Shape::Flag,
            required: false,
            absent: "true if the GPU driver supports it",
            about: "Whether clients of different users may run at once.",
        },
    ],
};
