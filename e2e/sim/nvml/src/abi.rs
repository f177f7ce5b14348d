//! The C structures of NVML (header of CUDA 13.3) that the simulated calls use.
//!
//! The size of every structure is asserted against the header on LP64. Field names are those of the
//! header in Rust spelling. A versioned structure starts with a word `size | version << 24`, which
//! the caller sets and the call checks.

use std::ffi::{c_char, c_void};

/// A structure whose first word says its size and version.
///
/// # Safety
/// `#[repr(C)]`, and the first field is the `u32` version word.
pub(crate) unsafe trait Versioned: Sized {
    const NUMBER: u32;
    const VERSION: u32 = size_of::<Self>() as u32 | Self::NUMBER << 24;
}

/// A structure for which all bytes are valid, zeros included. Calls clear it before they fill it.
///
/// # Safety
///
/// It consists only of integers, floats, raw pointers and arrays of them.
pub(crate) unsafe trait Plain: Copy {
    fn zeroed() -> Self {
        // SAFETY: by the contract of the trait, all-zero bytes are valid.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! structures {
    ($(
        $(#[$doc:meta])*
        $name:ident $size:literal $(version $number:literal)? { $($field:ident: $kind:ty),* $(,)? }
    )*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name { $(pub(crate) $field: $kind),* }
        const _: () = assert!(size_of::<$name>() == $size);
        // SAFETY: the macro is only used below, for structures of integers, floats, raw pointers
        // and arrays of them.
        unsafe impl Plain for $name {}
        $(
            // SAFETY: `repr(C)`, and each versioned structure below starts with `version: u32`.
            unsafe impl Versioned for $name { const NUMBER: u32 = $number; }
        )?
    )*};
}

structures! {
    Memory 24 { total: u64, free: u64, used: u64 }
    MemoryV2 40 version 2 { version: u32, total: u64, reserved: u64, free: u64, used: u64 }
    Bar1Memory 24 { total: u64, free: u64, used: u64 }
    /// The cgroup is a path that ends in NUL.
    SetMemoryLimits 24 { cgroup: *const c_char, soft: u64, hard: u64 }
    GetMemoryLimits 32 { cgroup: *const c_char, soft: u64, hard: u64, used: u64 }
    Utilization 8 { gpu: u32, memory: u32 }
    PciInfo 68 {
        bus_id_legacy: [c_char; 16], domain: u32, bus: u32, device: u32, pci_device_id: u32,
        pci_subsystem_id: u32,
        bus_id: [c_char; 32],
    }
    PciInfoExt 64 version 1 {
        version: u32, domain: u32, bus: u32, device: u32, pci_device_id: u32, pci_subsystem_id: u32,
        base_class: u32,
        sub_class: u32, bus_id: [c_char; 32],
    }
    AddressingMode 8 version 1 { version: u32, value: u32 }
    Pdi 16 version 1 { version: u32, value: u64 }
    /// Versions 1 and 2 have the same layout; only the meaning of some bytes differs.
    PlatformInfo 44 version 2 {
        version: u32, ib_guid: [u8; 16], chassis_serial_number: [u8; 16], slot_number: u8,
        tray_index: u8, host_id: u8,
        peer_type: u8, module_id: u8,
    }
    C2cModeInfo 4 { is_c2c_enabled: u32 }
    Capabilities 8 version 1 { version: u32, mask: u32 }
    DriverBranch 84 version 1 { version: u32, branch: [c_char; 80] }
    TemperatureV 12 version 1 { version: u32, sensor: u32, temperature: i32 }
    MarginTemperature 8 version 1 { version: u32, margin: i32 }
    Uuid 52 version 1 { version: u32, kind: u32, value: [u8; 41], padding: [u8; 3] }

    Attributes 40 {
        multiprocessors: u32, copy_engines: u32, decoders: u32, encoders: u32, jpeg_engines: u32,
        ofa_engines: u32,
        gpu_instance_slices: u32, compute_instance_slices: u32, memory_mib: u64,
    }
    Placement 8 { start: u32, size: u32 }
    GpuInstanceProfile 48 {
        id: u32, p2p: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32,
        encoders: u32, jpeg_engines: u32, ofa_engines: u32, memory_mib: u64,
    }
    GpuInstanceProfileV2 152 version 2 {
        version: u32, id: u32, p2p: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32, encoders: u32, jpeg_engines: u32, ofa_engines: u32, memory_mib: u64,
        name: [c_char; 96],
    }
    GpuInstanceProfileV3 152 version 3 {
        version: u32, id: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32,
        encoders: u32, jpeg_engines: u32, ofa_engines: u32, memory_mib: u64, name: [c_char; 96],
        capabilities: u32,
    }
    ComputeInstanceProfile 36 {
        id: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32, encoders: u32,
        jpeg_engines: u32, ofa_engines: u32,
    }
    ComputeInstanceProfileV2 136 version 2 {
        version: u32, id: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32,
        encoders: u32, jpeg_engines: u32, ofa_engines: u32, name: [c_char; 96],
    }
    ComputeInstanceProfileV3 140 version 3 {
        version: u32, id: u32, slices: u32, instances: u32, multiprocessors: u32, copy_engines: u32,
        decoders: u32,
        encoders: u32, jpeg_engines: u32, ofa_engines: u32, name: [c_char; 96], capabilities: u32,
    }
    GpuInstanceInfo 24 { device: u64, id: u32, profile_id: u32, placement: Placement }
    ComputeInstanceInfo 32 { device: u64, gpu_instance: u64, id: u32, profile_id: u32, placement: Placement }

    ProcessInfoV1 16 { pid: u32, used_memory: u64 }
    ProcessInfo 24 { pid: u32, used_memory: u64, gpu_instance_id: u32, compute_instance_id: u32 }
    ProcessUtilization 32 { pid: u32, timestamp: u64, sm: u32, memory: u32, encoder: u32, decoder: u32 }
    ProcessUtilizationInfo 40 {
        timestamp: u64, pid: u32, sm: u32, memory: u32, encoder: u32, decoder: u32, jpeg: u32, flow: u32,
    }
    ProcessesUtilizationInfo 24 version 1 {
        version: u32, entries: u32, since: u64, array: *mut ProcessUtilizationInfo,
    }
    ProcessDetail 32 {
        pid: u32, used_memory: u64, gpu_instance_id: u32, compute_instance_id: u32,
        used_protected_memory: u64,
    }
    ProcessDetailList 24 version 1 { version: u32, mode: u32, entries: u32, array: *mut ProcessDetail }

    EventData 32 { device: u64, kind: u64, data: u64, gpu_instance_id: u32, compute_instance_id: u32 }
    SystemEventSetRequest 16 version 1 { version: u32, set: u64 }
    SystemRegisterRequest 24 version 1 { version: u32, kinds: u64, set: u64 }
    SystemEventData 16 { kind: u64, gpu_id: u32 }
    SystemWaitRequest 32 version 1 {
        version: u32, timeout_ms: u32, set: u64, data: *mut SystemEventData, data_size: u32, events: u32,
    }

    RemappedRows 24 {
        correctable_active: u32, correctable_inactive: u32, uncorrectable_active: u32,
        uncorrectable_inactive: u32,
        pending: u32, failure: u32,
    }
    RepairStatus 12 version 1 { version: u32, channel_pending: u32, tpc_pending: u32 }
    RowRemapperHistogram 20 { max: u32, high: u32, partial: u32, low: u32, none: u32 }
    SramEccStatus 104 version 1 {
        version: u32, aggregate_uncorrected_parity: u64, aggregate_uncorrected_secded: u64,
        aggregate_corrected: u64,
        volatile_uncorrected_parity: u64, volatile_uncorrected_secded: u64, volatile_corrected: u64,
        bucket_l2: u64,
        bucket_sm: u64, bucket_pcie: u64, bucket_mcu: u64, bucket_other: u64, threshold_exceeded: u32,
    }
    UnrepairableMemory 4 { unrepairable: u32 }
    EccErrorCounts 32 { l1_cache: u64, l2_cache: u64, device_memory: u64, register_file: u64 }
    FieldValue 40 {
        field: u32, scope: u32, timestamp: i64, latency_us: i64, value_type: u32, result: u32, value: [u8; 8],
    }

    FabricInfo 28 { cluster_uuid: [u8; 16], status: u32, clique: u32, state: u32 }
    FabricInfoV2 36 version 2 {
        version: u32, cluster_uuid: [u8; 16], status: u32, clique: u32, state: u32, health_mask: u32,
    }
    FabricInfoV3 40 version 3 {
        version: u32, cluster_uuid: [u8; 16], status: u32, clique: u32, state: u32, health_mask: u32,
        health_summary: u8,
    }
    NvLinkInfoV1 8 version 1 { version: u32, is_nvle_enabled: u32 }
    NvLinkFirmware 16 { ucode: u8, major: u32, minor: u32, sub_minor: u32 }
    NvLinkInfoV2 1612 version 2 {
        version: u32, is_nvle_enabled: u32, firmware: [NvLinkFirmware; 100], valid: u32,
    }

    GpmSupport 8 { version: u32, supported: u32 }
    /// An array of metrics follows. Its length is that of the caller's header.
    GpmMetricsHead 24 { version: u32, metrics: u32, first: u64, second: u64 }
    GpmMetric 40 {
        metric: u32, result: u32, value: f64, short_name: *const c_void, long_name: *const c_void,
        unit: *const c_void,
    }
    ViolationTime 16 { reference: u64, violation: u64 }
    BridgeChips 1028 { count: u8, chips: [[u32; 2]; 128] }
    FbcStats 12 { sessions: u32, average_fps: u32, average_latency: u32 }
}
