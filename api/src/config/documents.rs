//! What may stand in the documents, as data for the reader and for the reference.

use crate::names::CONFIG_API_VERSION;
use crate::schema::{Field, Object, Shape};
use crate::sharing::{Injection, Interval, Priority};

pub(super) const TIME_SLICING: &str = "TimeSlicing";
pub(super) const MPS: &str = "MPS";

/// All documents of this module, for the reader and the reference.
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
    about: "For whole GPUs (DeviceClass `gpu.divvy.dev`). It says how the pods and containers of one claim share its GPU.",
    fields: &[
        API_VERSION,
        kind("GpuConfig"),
        Field {
            name: "sharing",
            shape: Shape::Object(&GPU_SHARING),
            required: false,
            absent: "nothing is set up: processes take turns as the GPU driver's default has it",
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
            absent: "nothing is set up",
            about: "How the instance is shared.",
        },
    ],
};

pub(super) static SHARE_CONFIG: Object = Object {
    name: "ShareConfig",
    about: "For shares, of a GPU or of a MIG instance: how the limits of a class's claims are kept. It belongs into a DeviceClass; in a claim it may say `ceiling` and nothing else, and no more than the class's. A class that is changed changes the shares that are there already, all but `injection`.",
    fields: &[
        API_VERSION,
        kind("ShareConfig"),
        Field {
            name: "injection",
            shape: Shape::OneOf(Injection::NAMES),
            required: false,
            absent: "preload",
            about: "How the library that keeps the limits comes into a container: `preload` by `/etc/ld.so.preload`, `shim` in the place of the GPU driver's own libraries, for programs that bear no preloaded library.",
        },
        Field {
            name: "observeOnly",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "Count what is used and refuse nothing. Memory of the GPU is then not safe from the share.",
        },
        Field {
            name: "priority",
            shape: Shape::OneOf(Priority::NAMES),
            required: false,
            absent: "Low",
            about: "While a share of priority High works, those of priority Low on the same GPU wait (whole GPUs only).",
        },
        Field {
            name: "weight",
            shape: Shape::Count(1, 10_000),
            required: false,
            absent: "100",
            about: "Compute time that is guaranteed to nobody, or not used, is divided by weight (whole GPUs only).",
        },
        Field {
            name: "ceiling",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "with `cores` no more than these; without, 100",
            about: "Per cent of the device's compute time that the share gets at most, however idle the device is. In a class, a share with `cores` gets what others leave up to it (whole GPUs only).",
        },
        Field {
            name: "overcommit",
            shape: Shape::Count(100, 1000),
            required: false,
            absent: "100",
            about: "Per cent of the claimed memory that the share may hold. What is beyond 100 is managed memory, which the GPU driver moves to the host's memory and back: the scheduler counts what was claimed, and the sum of what is really used may exceed the GPU.",
        },
        Field {
            name: "encoders",
            shape: Shape::Count(0, 1000),
            required: false,
            absent: "as many as the GPU driver allows",
            about: "Session quota of the video encoder: how many the share's processes may have open at once. What a session takes of the engine is not held. With `injection: preload` only.",
        },
        Field {
            name: "decoders",
            shape: Shape::Count(0, 1000),
            required: false,
            absent: "as many as the GPU driver allows",
            about: "The same of the video decoder.",
        },
        Field {
            name: "schedule",
            shape: Shape::List(&Shape::Object(&TIDE)),
            required: false,
            absent: "the same all day",
            about: "Hours of the day in which other numbers hold; where several have the hour, the last.",
        },
    ],
};

static TIDE: Object = Object {
    name: "Tide",
    about: "Hours of each day, in UTC, and what holds in them in place of what the ShareConfig says.",
    fields: &[
        Field { name: "from", shape: Shape::Clock, required: true, absent: "", about: "The first minute." },
        Field {
            name: "to",
            shape: Shape::Clock,
            required: true,
            absent: "",
            about: "The end, on the next day where it is earlier than `from`.",
        },
        Field {
            name: "priority",
            shape: Shape::OneOf(Priority::NAMES),
            required: false,
            absent: "as always",
            about: "As above.",
        },
        Field {
            name: "weight",
            shape: Shape::Count(1, 10_000),
            required: false,
            absent: "as always",
            about: "As above.",
        },
        Field {
            name: "ceiling",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "as always",
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
            about: "Processes take turns, or run at once as clients of an MPS control daemon.",
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
            about: "Processes run at once as clients of an MPS control daemon. TimeSlicing is refused: its interval does nothing on a MIG instance.",
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
        about: "How long one process runs before the next has its turn.",
    }],
};

static MPS_CONFIG: Object = Object {
    name: "MpsConfig",
    about: "Limits hold for each client process and are cooperative: MPS believes a client that lifts them.",
    fields: &[
        Field {
            name: "defaultActiveThreadPercentage",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "all multiprocessors",
            about: "Per cent of the multiprocessors that a client may use.",
        },
        Field {
            name: "defaultPinnedDeviceMemoryLimit",
            shape: Shape::Memory,
            required: false,
            absent: "all memory",
            about: "Device memory that a client may take, in whole Mi, rounded down.",
        },
        Field {
            name: "defaultPerDevicePinnedMemoryLimit",
            shape: Shape::Map(&Shape::Memory),
            required: false,
            absent: "the limit above on each device",
            about: "The same for one device: the key is 0, or for a whole GPU its UUID. A limit for a GPU that the claim did not get rests.",
        },
        Field {
            name: "multiUser",
            shape: Shape::Flag,
            required: false,
            absent: "where the GPU driver has it",
            about: "Whether clients of different users may run at once.",
        },
    ],
};
