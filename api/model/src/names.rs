//! Names for NVML's numbers, spelled as NVIDIA's Kubernetes components spell them.

/// The brand with that `nvmlBrandType_t`.
pub fn brand(number: u32) -> &'static str {
    match number {
        1 => "Quadro",
        2 => "Tesla",
        3 => "NVS",
        4 => "Grid",
        5 => "GeForce",
        6 => "Titan",
        7 => "NvidiaVApps",
        8 => "NvidiaVPC",
        9 => "NvidiaVCS",
        10 => "NvidiaVWS",
        11 => "NvidiaCloudGaming",
        12 => "QuadroRTX",
        13 => "NvidiaRTX",
        14 => "Nvidia",
        15 => "GeForceRTX",
        16 => "TitanRTX",
        _ => "Unknown",
    }
}

/// The architecture with that `nvmlDeviceArchitecture_t`.
pub fn architecture(number: u32) -> &'static str {
    match number {
        2 => "Kepler",
        3 => "Maxwell",
        4 => "Pascal",
        5 => "Volta",
        6 => "Turing",
        7 => "Ampere",
        8 => "Ada Lovelace",
        9 => "Hopper",
        10 => "Blackwell",
        13 => "Rubin",
        _ => "Unknown",
    }
}

/// The addressing mode with that `nvmlDeviceAddressingModeType_t`.
pub fn addressing_mode(number: u32) -> Option<&'static str> {
    match number {
        0 => Some("None"),
        1 => Some("HMM"),
        2 => Some("ATS"),
        _ => None,
    }
}
