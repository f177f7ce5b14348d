//! Bus ids and profile names, spelled as NVIDIA's Kubernetes components spell them.

use nvml_wrapper_sys::bindings as sys;

/// The first architecture whose MIG mode can be changed without a GPU reset.
pub(crate) const HOPPER: u32 = sys::NVML_DEVICE_ARCH_HOPPER;

/// Converts a bus id to the form of sysfs: `00000000:1A:00.0` becomes `0000:1a:00.0`. A domain
/// beyond 16 bits keeps its eight digits.
pub(crate) fn bus_id(nvml: &str) -> String {
    let lower = nvml.to_ascii_lowercase();
    match lower.strip_prefix("0000") {
        Some(short) if short.find(':') == Some(4) => short.to_owned(),
        _ => lower,
    }
}

/// The profile name from NVML without its prefix. An older GPU driver has none; then the name is
/// computed as NVIDIA's tools do.
pub(crate) fn profile(nvml: &str, index: u32, slices: u32, memory_mib: u64, total_bytes: u64) -> String {
    let name = nvml.strip_prefix("MIG ").unwrap_or(nvml);
    if name.split_once("g.").is_some_and(|(slices, _)| slices.parse::<u32>().is_ok()) {
        return name.to_owned();
    }
    let kind = match index {
        7 | 8 => "+me",
        10..=12 | 17 => "+gfx",
        13 | 14 => "-me",
        15 | 16 => "+me.all",
        _ => "",
    };
    format!("{slices}g.{}gb{kind}", gigabytes(memory_mib, total_bytes))
}

/// The memory of a profile in GB: in eighths of the GPU, rounded up, times the GPU's size in GiB.
fn gigabytes(memory_mib: u64, total_bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    let eighths = (memory_mib * MIB * 8).div_ceil(total_bytes.max(1));
    let whole = total_bytes.div_ceil(1 << 30);
    (eighths * whole + 4) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_converted_to_the_form_of_sysfs() {
        for (nvml, sysfs) in [
            ("00000000:1A:00.0", "0000:1a:00.0"),
            ("00000008:01:00.0", "0008:01:00.0"),
            ("00010000:01:00.0", "00010000:01:00.0"),
            ("0000:1A:00.0", "0000:1a:00.0"),
        ] {
            assert_eq!(bus_id(nvml), sysfs);
        }
    }

    #[test]
    fn profile_name_is_from_nvml_or_computed() {
        const H100: u64 = 81_559 << 20;
        for (nvml, index, slices, mib, total, name) in [
            ("MIG 1g.10gb+me", 7, 1, 9_984, H100, "1g.10gb+me"),
            ("3g.40gb", 2, 3, 40_448, H100, "3g.40gb"),
            ("", 0, 1, 9_984, H100, "1g.10gb"),
            ("", 9, 1, 20_096, H100, "1g.20gb"),
            ("", 2, 3, 40_448, H100, "3g.40gb"),
            ("", 4, 7, 81_152, H100, "7g.80gb"),
            ("", 7, 1, 9_984, H100, "1g.10gb+me"),
            ("", 0, 1, 5_836, 24_576 << 20, "1g.6gb"),
        ] {
            assert_eq!(profile(nvml, index, slices, mib, total), name);
        }
    }
}
